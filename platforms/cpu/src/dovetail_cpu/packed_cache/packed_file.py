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
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """A mapped file. Its packed weights keep the mapping alive.

    key: the cache key, as plain JSON values. forms: read-only, by name. checksums: the expected
    CRC-32 of each. identity: device and inode of the file.
    """

    key: Any
    forms: Mapping[str, memoryview]
    checksums: Mapping[str, int]
    identity: tuple[int, int]

    def verify(self, num_threads: int, *, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Read all packed weights. Raise PackedFileError if a checksum is wrong, or if cancelled.

        num_threads: how many threads compute checksums, with the calling thread. The exit of the
        interpreter does not wait for the others.
        """
        # The largest first: otherwise one thread verifies a large last entry alone.
        names = deque(sorted(self.forms, key=lambda name: -len(self.forms[name])))
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while names and not errors:
                    self._verify_entry(names.popleft(), is_cancelled)
            except IndexError:  # another thread took the last name
                pass
            except BaseException as error:
                errors.append(error)

        threads = []
        with suppress(RuntimeError):  # the limit on threads may be reached
            for _ in range(num_threads - 1):
                thread = threading.Thread(target=work, name="dovetail-checksums", daemon=True)
                thread.start()
                threads.append(thread)
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _verify_entry(self, name: str, is_cancelled: Callable[[], bool]) -> None:
        if is_cancelled():
            raise PackedFileError("the verification was cancelled")
        if zlib.crc32(self.forms[name]) != self.checksums[name]:
            raise PackedFileError(f"the checksum of {name} is wrong")


def read_packed(
    fd: int, key: Mapping[str, Any], *, num_threads: int, verified: PackedFile | None = None
) -> dict[str, memoryview]:
    """Map a file and return the packed weights by name. They keep the mapping alive.

    num_threads: number of threads that verify the checksums. verified: the same file, if it is
    already mapped and verified. Raises PackedFileError for a file that does not match `key` or is
    incomplete, and OSError if it cannot be read.
    """
    file = map_packed(fd) if verified is None else verified
    if file.key != key:
        raise PackedFileError("the file contains packed weights of another checkpoint or format")
    if verified is None:
        file.verify(num_threads)
    return dict(file.forms)


def map_packed(fd: int) -> PackedFile:
    """Map a file and read its index, but do not verify its packed weights.

    Raises PackedFileError for a file that is incomplete or has a damaged index, and OSError if it
    cannot be read.
    """
    status = os.fstat(fd)
    size = status.st_size
    if size < _HEADER.size:
        raise PackedFileError(f"the file has {size} bytes, which is too short for a header")
    mapped = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    key, rows = _read_index(mapped)
    forms: dict[str, memoryview] = {}
    for name, offset, num_bytes, _ in rows:
        if offset % PAGE_BYTES or not 0 < offset <= offset + num_bytes <= size:
            raise PackedFileError(f"the index gives {name} an offset outside of the file")
        forms[name] = mapped[offset : offset + num_bytes]
    checksums = {name: checksum for name, _, _, checksum in rows}
    identity = status.st_dev, status.st_ino
    return PackedFile(key=key, forms=forms, checksums=checksums, identity=identity)


def _read_index(mapped: memoryview) -> tuple[Any, list[tuple[str, int, int, int]]]:
    """Return the key of a file and its rows: name, offset, number of bytes and checksum."""
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
        size, key = int(index["size"]), index["key"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PackedFileError(f"the index of the file cannot be parsed ({error})") from error
    if size != len(mapped):
        raise PackedFileError(f"the file has {len(mapped)} bytes, expected {size}")
    return key, rows


def _index(key: Mapping[str, Any], size: int, rows: list[list[Any]]) -> bytes:
    return json.dumps({"key": key, "size": size, "entries": rows}).encode()


def _write(fd: int, data: memoryview, offset: int) -> None:
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        while piece:
            written = os.pwrite(fd, piece, offset)
            piece, offset = piece[written:], offset + written
