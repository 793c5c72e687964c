"""Reads the metadata of a GGUF file: scalars, strings and arrays.

Lengths and counts are compared with the size of the file. Arrays and long strings are converted
when they are read, and only up to a limit: a value of 1 byte takes up to 16 bytes as an object.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.value_checks import shorten

MAX_METADATA_BYTES = 512 << 20
MAX_STRINGS = 1 << 22
"""Maximum number of strings in one metadata array."""
MAX_READ_VALUES = 1 << 22
"""Maximum number of values of an array that is read."""
MAX_READ_BYTES = 64 << 20
"""Maximum size of an array or a string that is read."""
_SHORT_TEXT_BYTES = 1 << 12
"""Longer strings are converted when they are read."""

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
U32, U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, kw_only=True)
class _Array:
    """An array of metadata that has not been converted. start, end: bytes of its elements."""

    type: int
    count: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class _Text:
    """A long string of metadata that has not been converted. start, end: its bytes."""

    start: int
    end: int


class Damaged(Exception):  # noqa: N818  # a phrase that becomes a ModelError
    """The file is damaged. The message is a clause that describes the damage."""


class Metadata(Mapping[str, Any]):
    """Metadata by key. Arrays and long strings are converted when they are read."""

    def __init__(self, path: Path, memory: memoryview, entries: Mapping[str, Any]) -> None:
        self._path, self._memory, self._entries = path, memory, entries

    def __getitem__(self, key: str) -> Any:
        """Return a value. Arrays are returned as lists.

        Raises ModelError, naming file and key, for a damaged array and for more than
        `MAX_READ_VALUES` or `MAX_READ_BYTES`.
        """
        value = self._entries[key]
        if not isinstance(value, (_Array, _Text)):
            return value
        num_values = value.count if isinstance(value, _Array) else 1
        num_bytes = value.end - value.start
        if num_values > MAX_READ_VALUES or num_bytes > MAX_READ_BYTES:
            raise ModelError(
                f"{self._path}: {shorten(key)[1:-1]} has {num_values} values in {num_bytes} bytes; "
                f"the limits are {MAX_READ_VALUES} values and {MAX_READ_BYTES} bytes."
            )
        cursor = Cursor(self._memory, value.start)
        try:
            if isinstance(value, _Text):
                return bytes(cursor.take(num_bytes)).decode("utf-8", "replace")
            return cursor.elements(value)
        except Damaged as error:
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


class Cursor:
    """Reads values one by one. Every method raises Damaged at the end of the file."""

    def __init__(self, memory: memoryview, position: int) -> None:
        self._memory, self.place = memory, position

    def take(self, num_bytes: int) -> memoryview:
        """Return the next bytes."""
        end = self.place + num_bytes
        if end > len(self._memory) or end > MAX_METADATA_BYTES:
            raise Damaged(f"{num_bytes} bytes at {self.place} extend past the end of the metadata")
        piece = self._memory[self.place : end]
        self.place = end
        return piece

    def unpack(self, form: struct.Struct) -> Any:
        """Return a number or a bool."""
        return form.unpack(self.take(form.size))[0]

    def count(self, maximum: int) -> int:
        """Return a count. Raise Damaged if it exceeds `maximum`."""
        count: int = self.unpack(U64)
        if count > maximum:
            raise Damaged(f"it has a count of {count}; the limit is {maximum}")
        return count

    def text(self, max_bytes: int) -> str:
        """Return a string. Bytes that are not UTF-8 become U+FFFD."""
        return bytes(self.take(self.count(max_bytes))).decode("utf-8", "replace")

    def value(self) -> Any:
        """Return a scalar or a string; unconverted, if it is an array or a long string."""
        kind = self.unpack(U32)
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise Damaged(f"a value has the unknown type {kind}")
        return self.unpack(_SCALARS[kind])

    def elements(self, array: _Array) -> list[Any]:
        """Return the elements of an array that starts at the current position."""
        if array.type == _STRING:
            return self._texts(array.count)
        form = _SCALARS[array.type]
        content = self.take(array.end - array.start)
        return [value for (value,) in form.iter_unpack(content)]

    def _string(self) -> str | _Text:
        content = self.take(self.count(MAX_METADATA_BYTES))
        if len(content) > _SHORT_TEXT_BYTES:
            return _Text(start=self.place - len(content), end=self.place)
        return str(content, "utf-8", "replace")

    def _array(self) -> _Array:
        kind, count = self.unpack(U32), self.unpack(U64)
        start = self.place
        if kind == _STRING:
            if count > MAX_STRINGS:
                raise Damaged(f"an array has {count} strings; the limit is {MAX_STRINGS}")
            self._skip_strings(count)
        elif kind in _SCALARS:
            self.take(count * _SCALARS[kind].size)
        else:
            raise Damaged(f"an array has elements of the type {kind}, which is not supported")
        return _Array(type=kind, count=count, start=start, end=self.place)

    def _skip_strings(self, count: int) -> None:
        """Skip strings. A vocabulary has 10^5 strings, for which calls of `take` are too slow."""
        end, unpack, memory = self.place, U64.unpack_from, self._memory[:MAX_METADATA_BYTES]
        try:
            for _ in range(count):
                end += 8 + unpack(memory, end)[0]
        except (struct.error, OverflowError):
            end = len(memory) + 1
        self._end_strings(end)

    def _texts(self, count: int) -> list[str]:
        """Return the next strings."""
        end, unpack, memory = self.place, U64.unpack_from, self._memory[:MAX_METADATA_BYTES]
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
            raise Damaged(f"a string in the array at {self.place} extends past the metadata")
        self.place = end
