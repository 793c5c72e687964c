"""Columns as one frame of bytes, and back: what a ring carries.

    head        magic, version, kind, number of columns, two 64-bit numbers of the kind's own
    lengths     bytes of each column
    columns     one after the other, in the machine's byte order

Every length is checked before anything is read; whatever does not fit is refused with MessageError
and makes nothing. A machine of another byte order reads another magic. Depends on no plan and no
result.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

from dovetail.errors import MessageError

VERSION = 1
MAX_COLUMNS = 256
_MAGIC = 0x44564643
_HEAD = Struct("=IHHIIqq")
_LENGTHS = tuple(Struct(f"={count}I") for count in range(MAX_COLUMNS + 1))
_TOP_BYTE = 3 if sys.byteorder == "little" else 0


@dataclass(frozen=True, slots=True)
class ColumnFrame:
    """A frame taken apart. columns: views of it; numbers: the kind's own two."""

    columns: list[memoryview]
    numbers: tuple[int, int]


def pack_columns(
    kind: int, columns: Sequence[bytes | array[int]], numbers: tuple[int, int]
) -> bytes:
    """Return the frame. Raises ValueError for more than MAX_COLUMNS."""
    count = len(columns)
    if count > MAX_COLUMNS:
        raise ValueError(f"{count} columns; a frame holds at most {MAX_COLUMNS}")
    parts = [one if isinstance(one, bytes) else one.tobytes() for one in columns]
    head = _HEAD.pack(_MAGIC, VERSION, kind, count, 0, *numbers)
    return b"".join((head, _LENGTHS[count].pack(*map(len, parts)), *parts))


def frame_kind(frame: bytes) -> int:
    """Return the kind that a frame says it is of; raise MessageError if it is too short for one."""
    if len(frame) < _HEAD.size:
        raise MessageError(f"a frame of {len(frame)} bytes; its head alone has {_HEAD.size}.")
    kind: int = _HEAD.unpack_from(frame)[2]
    return kind


def unpack_columns(frame: bytes, kind: int, *, least: int) -> ColumnFrame:
    """Return a frame of `kind` with at least so many columns; raise MessageError for any other."""
    if len(frame) < _HEAD.size:
        raise MessageError(f"a frame of {len(frame)} bytes; its head alone has {_HEAD.size}.")
    magic, version, found, count, reserved, *numbers = _HEAD.unpack_from(frame)
    if (magic, version, found, reserved) != (_MAGIC, VERSION, kind, 0):
        raise MessageError(
            f"a frame with magic {magic:#x}, version {version} and kind {found}; wanted are "
            f"{_MAGIC:#x}, {VERSION} and {kind}."
        )
    at = _HEAD.size + 4 * count
    if not least <= count <= MAX_COLUMNS or len(frame) < at:
        raise MessageError(f"a frame of {len(frame)} bytes with {count} columns, or {least} more.")
    lengths = _LENGTHS[count].unpack_from(frame, _HEAD.size)
    if at + sum(lengths) != len(frame):
        raise MessageError(f"a frame of {len(frame)} bytes; its columns have {sum(lengths)}.")
    view, columns = memoryview(frame), []
    for length in lengths:
        columns.append(view[at : at + length])
        at += length
    return ColumnFrame(columns, (numbers[0], numbers[1]))


def int32(column: memoryview | bytes, name: str) -> array[int]:
    """Return a column of int32, a copy; raise MessageError if its length is not a multiple of 4."""
    values = array("i")
    if len(column) % 4:
        raise MessageError(f"{name} has {len(column)} bytes: that is not a column of int32.")
    values.frombytes(column)
    return values


def counts32(column: memoryview | bytes, name: str) -> array[int]:
    """Return a column of int32 without negative values; raise MessageError for any other."""
    values = array("i")
    if not column:
        return values
    content = bytes(column)
    # The sign is in the top byte: looking at those bytes costs a tenth of `min`.
    if len(content) % 4 or not content[_TOP_BYTE::4].isascii():
        raise MessageError(f"{name} is not a column of int32 ≥ 0.")
    values.frombytes(content)
    return values


def uint8(column: memoryview) -> array[int]:
    """Return a column of uint8, a copy."""
    return array("B", bytes(column))


def flags8(column: memoryview, name: str) -> array[int]:
    """Return a column of uint8 that are 0 or 1; raise MessageError for any other."""
    content = bytes(column)
    if content.translate(None, b"\0\1"):
        raise MessageError(f"{name} holds {max(content)}; it may hold 0 and 1.")
    return array("B", content)


def check_lengths(wanted: int, **columns: Sequence[int]) -> None:
    """Raise MessageError unless each column has `wanted` entries."""
    for name, column in columns.items():
        if len(column) != wanted:
            raise MessageError(f"{name} has {len(column)} entries instead of {wanted}.")
