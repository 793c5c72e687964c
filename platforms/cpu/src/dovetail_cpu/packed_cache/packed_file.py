"""The file of one model's packed weights: a header, an index, and the bytes of each layer.

    magic            16 bytes
    version, length and CRC-32 of the index, 0        four little-endian uint32
    index            JSON: {"key": …, "size": …, "entries": [[name, offset, bytes, CRC-32], …]}
    entries          each aligned to a page

The index states the total size, and checksums cover every byte. Reading verifies all of them:
CRC-32 runs at 6 GB/s per thread, and it touches the pages that the first step needs anyway.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

MAGIC = b"DOVETAIL PACKED\n"
VERSION = 1
PAGE_BYTES = 4096
_HEADER = struct.Struct("<16s4I")
_MAX_INDEX_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20


class PackedFileError(Exception):
    """The file cannot be used. The message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class PackedEntry:
    """The packed weights of one layer. form: read-only, aligned to a page of the file."""

    name: str
    form: memoryview


def write_packed(fd: int, key: Mapping[str, Any], entries: Iterable[PackedEntry]) -> None:
    """Write a whole file and flush it to the disk. Raise OSError if that fails."""
    forms = list(entries)
    # The index contains offsets that depend on its length: measure it with full-width numbers.
    widest = [[entry.name, 1 << 62, len(entry.form), (1 << 32) - 1] for entry in forms]
    room = len(_index(key, 1 << 62, widest))
    rows: list[list[Any]] = []
    end = _HEADER.size + room
    for entry in forms:
        offset = -(-end // PAGE_BYTES) * PAGE_BYTES
        rows.append([entry.name, offset, len(entry.form), zlib.crc32(entry.form)])
        end = offset + len(entry.form)
    index = _index(key, end, rows).ljust(room)
    header = _HEADER.pack(MAGIC, VERSION, len(index), zlib.crc32(index), 0)
    _write(fd, memoryview(header + index), 0)
    for entry, (_, offset, _, _) in zip(forms, rows, strict=True):
        _write(fd, entry.form, offset)
    os.ftruncate(fd, end)
    # Without a flush, a crash of the machine can leave a file of zeros with this name.
    os.fsync(fd)


def read_packed(fd: int, key: Mapping[str, Any], *, num_threads: int) -> dict[str, memoryview]:
    """Map a file and return the packed weights by name. They keep the mapping alive.

    num_threads: number of threads that verify the checksums. Raises PackedFileError for a file that
    does not match `key` or is incomplete, and OSError if it cannot be read.
    """
    size = os.fstat(fd).st_size
    if size < _HEADER.size:
        raise PackedFileError(f"the file has {size} bytes, which is too short for a header")
    mapped = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    rows = _read_index(mapped, key)
    forms: dict[str, memoryview] = {}
    sums: list[int] = []
    for name, offset, num_bytes, checksum in rows:
        if offset % PAGE_BYTES or not 0 < offset <= offset + num_bytes <= size:
            raise PackedFileError(f"the index gives {name} an offset outside of the file")
        forms[name] = mapped[offset : offset + num_bytes]
        sums.append(checksum)
    # The largest first: otherwise one thread verifies a large last entry alone.
    order = sorted(zip(forms.items(), sums, strict=True), key=lambda row: -len(row[0][1]))
    with ThreadPoolExecutor(num_threads) as pool:
        checksums = list(pool.map(zlib.crc32, [form for (_, form), _ in order]))
    for ((name, _), expected), actual in zip(order, checksums, strict=True):
        if actual != expected:
            raise PackedFileError(f"the checksum of {name} is wrong")
    return forms


def _read_index(mapped: memoryview, key: Mapping[str, Any]) -> list[tuple[str, int, int, int]]:
    magic, version, length, checksum, _ = _HEADER.unpack_from(mapped)
    if magic != MAGIC:
        raise PackedFileError("the file does not contain packed weights")
    if version != VERSION:
        raise PackedFileError(f"the file has version {version}, expected version {VERSION}")
    text = bytes(mapped[_HEADER.size : _HEADER.size + min(length, _MAX_INDEX_BYTES)])
    if len(text) != length or zlib.crc32(text) != checksum:
        raise PackedFileError("the index of the file is damaged")
    try:
        index = json.loads(text)
        rows = [(str(n), int(o), int(b), int(c)) for n, o, b, c in index["entries"]]
        size, stored_key = int(index["size"]), index["key"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PackedFileError(f"the index of the file cannot be parsed ({error})") from error
    if size != len(mapped):
        raise PackedFileError(f"the file has {len(mapped)} bytes, expected {size}")
    if stored_key != key:
        raise PackedFileError("the file contains packed weights of another checkpoint or format")
    return rows


def _index(key: Mapping[str, Any], size: int, rows: list[list[Any]]) -> bytes:
    return json.dumps({"key": key, "size": size, "entries": rows}).encode()


def _write(fd: int, data: memoryview, offset: int) -> None:
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        while piece:
            written = os.pwrite(fd, piece, offset)
            piece, offset = piece[written:], offset + written
