"""Reads the container of a GGUF file: metadata and the list of tensors.

Supports versions 2 and 3, little-endian. All values are checked before they are used: lengths and
counts against the size of the file, offsets and alignment against the data section, names for
duplicates. Metadata arrays are converted when they are read. Data is memory-mapped, never copied.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.model_files import list_model_files, open_model_file
from dovetail_gguf.tensor_types import TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ENTRIES = 1 << 16
"""Maximum number of metadata entries."""
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
MAX_METADATA_BYTES = 512 << 20
MAX_SPLITS = 1000
MAX_STRINGS = 1 << 22
"""Maximum number of strings in one metadata array."""

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor. shape: outermost dimension first. The last one is stored contiguously.

    offset: the position of the data in the file, in bytes. path: the file that contains it.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    path: Path
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """The size in bytes of the values along the last dimension."""
        return self.shape[-1] // self.type.num_values * self.type.num_bytes


@dataclass(frozen=True, kw_only=True)
class _Array:
    """An array of metadata that has not been converted. start, end: bytes of its elements."""

    type: int
    count: int
    start: int
    end: int


class _Damaged(Exception):  # noqa: N818  # a phrase that becomes a ModelError
    """The file is damaged. The message is a clause that describes the damage."""


class Metadata(Mapping[str, Any]):
    """Metadata by key. Arrays are converted to lists when they are read."""

    def __init__(self, path: Path, memory: memoryview, entries: Mapping[str, Any]) -> None:
        self._path, self._memory, self._entries = path, memory, entries

    def __getitem__(self, key: str) -> Any:
        """Return a value. Arrays are returned as lists. Raises ModelError for a damaged array."""
        value = self._entries[key]
        if not isinstance(value, _Array):
            return value
        try:
            return _Cursor(self._memory, value.start).elements(value)
        except _Damaged as error:
            raise ModelError(f"{self._path} is damaged: {key}: {error}.") from None

    def __contains__(self, key: object) -> bool:
        """Return whether the key exists, without converting its value."""
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in the order of the file."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def count(self, key: str) -> int | None:
        """Return the number of elements of an array, or None for other values. Converts nothing."""
        value = self._entries.get(key)
        return value.count if isinstance(value, _Array) else None

    def num_bytes(self, key: str) -> int:
        """Return the size of an array in the file, in bytes, or 0 if it is not an array."""
        value = self._entries.get(key)
        return value.end - value.start if isinstance(value, _Array) else 0


class GGUFFile:
    """One GGUF file, or all parts of a split model.

    path: the path of the file, or of the first part. metadata: the metadata of that file. tensors:
    the tensors of all parts, by name.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the metadata and the list of tensors of all parts.

        Raises a ModelError that names the file if it is unreadable, damaged or not supported.
        """
        self._parts = [_Part(path)]
        self.path = path
        self.metadata = self._parts[0].metadata
        self._parts += [_Part(other) for other in self._other_paths()]
        self.tensors: dict[str, TensorInfo] = {}
        for index, part in enumerate(self._parts):
            if part.metadata.get("split.no", index) != index:
                raise ModelError(f"{part.path} is not part {index + 1}; its split.no is different.")
            for info in part.tensors:
                if info.name in self.tensors:
                    raise ModelError(
                        f"{info.path} is damaged: the tensor {info.name!r:.200} occurs twice."
                    )
                self.tensors[info.name] = info
        stated = self.metadata.get("split.tensors.count")
        if len(self._parts) > 1 and stated not in (None, len(self.tensors)):
            found = f"but the parts contain {len(self.tensors)}. Download the parts again."
            raise ModelError(f"{path} states {stated} tensors in all parts, {found}")

    @property
    def paths(self) -> list[Path]:
        """The files of all parts."""
        return [part.path for part in self._parts]

    def data(self, name: str) -> memoryview:
        """Return the bytes of a tensor: a read-only view of the mapped file."""
        info = self.tensors[name]
        (part,) = (part for part in self._parts if part.path == info.path)
        return part.memory[info.offset : info.offset + info.num_bytes]

    def _other_paths(self) -> list[Path]:
        count = self.metadata.get("split.count", 0)
        if not isinstance(count, int) or count <= 1:
            return []
        match = _SPLIT_NAME.fullmatch(self.path.name)
        if match is None or int(match["count"]) != count or count > MAX_SPLITS:
            raise ModelError(
                f"{self.path} is one of {count} parts, but its name does not end in "
                "-00001-of-NNNNN.gguf. Restore the original names of the parts."
            )
        if int(match["number"]) != 1 or self.metadata.get("split.no", 0) != 0:
            raise ModelError(
                f"{self.path} is not the first part of the model. Pass "
                f"{match['stem']}-00001-of-{match['count']}.gguf."
            )
        return [
            self.path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf")
            for number in range(2, count + 1)
        ]


def first_part(paths: list[Path]) -> Path | None:
    """Return the first part if `paths` are all parts of one split model, otherwise None."""
    matches = [_SPLIT_NAME.fullmatch(path.name) for path in paths]
    stems = {(match["stem"], match["count"]) for match in matches if match is not None}
    if None in matches or len(stems) != 1:
        return None
    first = [path for path, match in zip(paths, matches, strict=True) if int(match["number"]) == 1]
    return first[0] if first else None


def find_file(path: Path) -> Path:
    """Return `path`, or the only model in the directory `path`. Raise ModelError for none."""
    if not path.is_dir():
        return path
    files = list_model_files(path, ".gguf", at_most=MAX_SPLITS)
    chosen = files[0] if len(files) == 1 else first_part(files)
    if chosen is None:
        raise ModelError(f"{path} contains {len(files)} GGUF files. Pass the path of one file.")
    return chosen


class _Part:
    """One mapped file. metadata, tensors: as in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_model_file(path) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes < len(MAGIC) + 20:
                raise ModelError(f"{path} is not a GGUF file: it has only {num_bytes} bytes.")
            # Writable, because torch requires it; a private mapping never changes the file.
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=protection)
        self.memory = memoryview(mapped)
        try:
            self._read(_Cursor(self.memory, 0))
        except _Damaged as error:
            raise ModelError(f"{path} is damaged: {error}. Download it again.") from None

    @cached_property
    def alignment(self) -> int:
        """Every tensor starts at a multiple of this number of bytes."""
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & 7:
            raise _Damaged(f"general.alignment is {alignment!r:.40}, not a multiple of 8")
        return alignment

    def _read(self, cursor: _Cursor) -> None:
        self._check_head(cursor)
        num_tensors, num_entries = cursor.count(MAX_TENSORS), cursor.count(MAX_ENTRIES)
        entries: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.text(MAX_NAME_BYTES)
            if key in entries:
                raise _Damaged(f"the key {key!r:.200} occurs twice")
            entries[key] = cursor.value()
        self.metadata = Metadata(self.path, self.memory, entries)
        heads = [self._tensor_head(cursor) for _ in range(num_tensors)]
        begin = -(-cursor.place // self.alignment) * self.alignment
        self.tensors = [self._tensor(begin, *head) for head in heads]

    def _check_head(self, cursor: _Cursor) -> None:
        magic = bytes(cursor.take(len(MAGIC)))
        if magic != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {magic!r}.")
        version = cursor.unpack(_U32)
        if version.to_bytes(4, "little")[::-1] in [
            known.to_bytes(4, "little") for known in VERSIONS
        ]:
            raise ModelError(f"{self.path} is big-endian; convert it to a little-endian GGUF file.")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.path} has GGUF version {version}; supported: "
                f"{', '.join(map(str, VERSIONS))}. Convert the model again."
            )

    def _tensor_head(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.text(MAX_NAME_BYTES)
        num_dimensions = cursor.unpack(_U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise _Damaged(f"the tensor {name!r:.200} has {num_dimensions} dimensions")
        shape = tuple(cursor.unpack(_U64) for _ in range(num_dimensions))[::-1]
        return name, shape, cursor.unpack(_U32), cursor.unpack(_U64)

    def _tensor(
        self, begin: int, name: str, shape: tuple[int, ...], number: int, offset: int
    ) -> TensorInfo:
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            raise ModelError(
                f"{self.path}: the tensor {name!r:.200} has the type {number}, which is not "
                f"supported. Supported: {', '.join(one.name for one in TENSOR_TYPES.values())}."
            )
        num_values = 1
        for size in shape:
            num_values *= size
            if size < 1 or num_values > len(self.memory) * 256:
                raise _Damaged(f"the tensor {name!r:.200} has the invalid shape {list(shape)}")
        if shape[-1] % kind.num_values:
            raise _Damaged(
                f"the tensor {name!r:.200} has rows of {shape[-1]} values, but blocks of "
                f"{kind.name} contain {kind.num_values} values"
            )
        num_bytes = num_values // kind.num_values * kind.num_bytes
        if offset % self.alignment:
            raise _Damaged(f"the tensor {name!r:.200} has the unaligned offset {offset}")
        if (end := begin + offset + num_bytes) > (size := len(self.memory)):
            raise _Damaged(f"the tensor {name!r:.200} ends at byte {end} of a file of {size} bytes")
        return TensorInfo(
            name=name,
            shape=shape,
            type=kind,
            path=self.path,
            offset=begin + offset,
            num_bytes=num_bytes,
        )


class _Cursor:
    """Reads values one by one. Every method raises _Damaged at the end of the file."""

    def __init__(self, memory: memoryview, position: int) -> None:
        self._memory, self.place = memory, position

    def take(self, num_bytes: int) -> memoryview:
        """Return the next bytes."""
        end = self.place + num_bytes
        if end > len(self._memory) or end > MAX_METADATA_BYTES:
            raise _Damaged(f"{num_bytes} bytes at {self.place} extend past the end of the metadata")
        piece = self._memory[self.place : end]
        self.place = end
        return piece

    def unpack(self, form: struct.Struct) -> Any:
        """Return a number or a bool."""
        return form.unpack(self.take(form.size))[0]

    def count(self, maximum: int) -> int:
        """Return a count. Raise _Damaged if it exceeds `maximum`."""
        count: int = self.unpack(_U64)
        if count > maximum:
            raise _Damaged(f"it has a count of {count}; the limit is {maximum}")
        return count

    def text(self, max_bytes: int = MAX_METADATA_BYTES) -> str:
        """Return a string. Bytes that are not UTF-8 become U+FFFD."""
        return bytes(self.take(self.count(max_bytes))).decode("utf-8", "replace")

    def value(self) -> Any:
        """Return a scalar, a string or an unconverted array."""
        kind = self.unpack(_U32)
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _Damaged(f"a value has the unknown type {kind}")
        return self.unpack(_SCALARS[kind])

    def elements(self, array: _Array) -> list[Any]:
        """Return the elements of an array that starts at the current position."""
        if array.type == _STRING:
            return self._texts(array.count)
        form = _SCALARS[array.type]
        content = self.take(array.end - array.start)
        return [value for (value,) in form.iter_unpack(content)]

    def _array(self) -> _Array:
        kind, count = self.unpack(_U32), self.unpack(_U64)
        start = self.place
        if kind == _STRING:
            if count > MAX_STRINGS:
                raise _Damaged(f"an array has {count} strings; the limit is {MAX_STRINGS}")
            self._skip_strings(count)
        elif kind in _SCALARS:
            self.take(count * _SCALARS[kind].size)
        else:
            raise _Damaged(f"an array has elements of the type {kind}, which is not supported")
        return _Array(type=kind, count=count, start=start, end=self.place)

    def _skip_strings(self, count: int) -> None:
        """Skip strings. A vocabulary has 10^5 strings, for which calls of `take` are too slow."""
        end, unpack, memory = self.place, _U64.unpack_from, self._memory[:MAX_METADATA_BYTES]
        try:
            for _ in range(count):
                end += 8 + unpack(memory, end)[0]
        except (struct.error, OverflowError):
            end = len(memory) + 1
        self._end_strings(end)

    def _texts(self, count: int) -> list[str]:
        """Return the next strings."""
        end, unpack, memory = self.place, _U64.unpack_from, self._memory[:MAX_METADATA_BYTES]
        texts = []
        try:
            for _ in range(count):
                start = end + 8
                end = start + unpack(memory, end)[0]
                texts.append(str(memory[start:end], "utf-8", "replace"))
        except (struct.error, OverflowError):
            end = len(memory) + 1
        self._end_strings(end)
        return texts

    def _end_strings(self, end: int) -> None:
        if end > min(len(self._memory), MAX_METADATA_BYTES):
            raise _Damaged(f"a string in the array at {self.place} extends past the metadata")
        self.place = end
