"""Reads the container of a GGUF file: metadata and the list of tensors.

Supports versions 2 and 3, little-endian. All values are checked before they are used: lengths and
counts against the size of the file, offsets and alignment against the data section, names for
duplicates. Tensors must not overlap, so a file cannot contain more weights than bytes. Data is
memory-mapped, never copied.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.model_files import list_model_files, open_model_file
from dovetail_gguf.metadata import U32, U64, Cursor, Damaged, Metadata
from dovetail_gguf.tensor_types import TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ENTRIES = 1 << 16
"""Maximum number of metadata entries."""
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_TENSOR_NAME_CHARS = 500
MAX_DIMENSIONS = 4
MAX_SPLITS = 1000

_RENAMED = "Parts were renamed or exchanged; restore their original names."
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
            if (number := part.metadata.get("split.no", index)) != index:
                raise ModelError(
                    f"{part.path} is not part {index + 1}: its split.no is {number!r:.40}, not "
                    f"{index}. {_RENAMED}"
                )
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
        if count > MAX_SPLITS:
            raise ModelError(f"{self.path} is one of {count} parts; the limit is {MAX_SPLITS}.")
        match = _SPLIT_NAME.fullmatch(self.path.name)
        if match is None or int(match["count"]) != count:
            raise ModelError(
                f"{self.path} is one of {count} parts, but its name does not end in "
                f"-NNNNN-of-{count:05}.gguf. Restore the original names of the parts."
            )
        index = int(match["number"]) - 1
        if (stated := self.metadata.get("split.no", index)) != index:
            raise ModelError(
                f"{self.path} has the name of part {index + 1}, but its split.no is "
                f"{stated!r:.40}, not {index}. {_RENAMED}"
            )
        if index != 0:
            first = f"{match['stem']}-00001-of-{match['count']}.gguf"
            advice = f"Pass {first}."
            if not os.path.exists(self.path.with_name(first)):
                advice = f"The first part {first} is missing. Download all parts."
            raise ModelError(f"{self.path} is not the first part of the model. {advice}")
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
            self._read(Cursor(self.memory, 0))
        except Damaged as error:
            raise ModelError(f"{path} is damaged: {error}. Download it again.") from None

    @cached_property
    def alignment(self) -> int:
        """Every tensor starts at a multiple of this number of bytes."""
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & 7:
            raise Damaged(f"general.alignment is {alignment!r:.40}, not a multiple of 8")
        return alignment

    def _read(self, cursor: Cursor) -> None:
        self._check_head(cursor)
        num_tensors, num_entries = cursor.count(MAX_TENSORS), cursor.count(MAX_ENTRIES)
        entries: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.text(MAX_NAME_BYTES)
            if key in entries:
                raise Damaged(f"the key {key!r:.200} occurs twice")
            entries[key] = cursor.value()
        self.metadata = Metadata(self.path, self.memory, entries)
        heads = [self._tensor_head(cursor) for _ in range(num_tensors)]
        begin = -(-cursor.place // self.alignment) * self.alignment
        self.tensors = [self._tensor(begin, *head) for head in heads]
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        ordered = sorted(self.tensors, key=lambda info: info.offset)
        for info, after in pairwise(ordered):
            if info.offset + info.num_bytes > after.offset:
                raise Damaged(f"the tensors {info.name!r:.200} and {after.name!r:.200} overlap")

    def _check_head(self, cursor: Cursor) -> None:
        magic = bytes(cursor.take(len(MAGIC)))
        if magic != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {magic!r}.")
        version = cursor.unpack(U32)
        if version.to_bytes(4, "little")[::-1] in [
            known.to_bytes(4, "little") for known in VERSIONS
        ]:
            raise ModelError(f"{self.path} is big-endian; convert it to a little-endian GGUF file.")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.path} has GGUF version {version}; supported: "
                f"{', '.join(map(str, VERSIONS))}. Convert the model again."
            )

    def _tensor_head(self, cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.text(MAX_NAME_BYTES)
        if len(name) > MAX_TENSOR_NAME_CHARS or not name.isprintable():
            raise Damaged(f"a tensor has the name {name!r:.200}, which is too long or unprintable")
        num_dimensions = cursor.unpack(U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise Damaged(f"the tensor {name!r:.200} has {num_dimensions} dimensions")
        shape = tuple(cursor.unpack(U64) for _ in range(num_dimensions))[::-1]
        return name, shape, cursor.unpack(U32), cursor.unpack(U64)

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
                raise Damaged(f"the tensor {name!r:.200} has the invalid shape {list(shape)}")
        if shape[-1] % kind.num_values:
            raise Damaged(
                f"the tensor {name!r:.200} has rows of {shape[-1]} values, but blocks of "
                f"{kind.name} contain {kind.num_values} values"
            )
        num_bytes = num_values // kind.num_values * kind.num_bytes
        if offset % self.alignment:
            raise Damaged(f"the tensor {name!r:.200} has the unaligned offset {offset}")
        if (end := begin + offset + num_bytes) > (size := len(self.memory)):
            raise Damaged(f"the tensor {name!r:.200} ends at byte {end} of a file of {size} bytes")
        return TensorInfo(
            name=name,
            shape=shape,
            type=kind,
            path=self.path,
            offset=begin + offset,
            num_bytes=num_bytes,
        )
