"""The cache of compiled code on disk: one file per key with all files that a backend has written.

    magic            16 bytes
    checksum         32 bytes, SHA-256 of the rest
    length           8 bytes, little-endian, of the index
    index            JSON: {"key": …, "files": [[path, bytes, is executable], …]}
    contents         of the files, in order

The checksum is verified before any file is restored. The directory must belong to this user and no
other user may write to it (`CacheFolder`), so the checksum only needs to detect accidental damage.
A file that cannot be used is logged and deleted, and the code is recompiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dovetail.errors import ConfigError
from dovetail_torch.cache_folder import CacheFolder, FolderError

logger = logging.getLogger(__name__)

ENDING = ".compiled"
MAGIC = b"DOVETAIL CODE 1\n"
_CHECKSUM_BYTES = 32
_LENGTH_BYTES = 8
_HEAD_BYTES = len(MAGIC) + _CHECKSUM_BYTES + _LENGTH_BYTES
_MAX_FILES = 100_000
MAX_ENTRY_BYTES = 1 << 30
MAX_FOLDER_BYTES = 4 << 30


class CacheEntryError(Exception):
    """A cache file cannot be used. The message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The result of `CodeCache.restore`. state: "hit", "miss" or "damaged". num_bytes: size."""

    state: str
    num_bytes: int = 0


class CodeCache:
    """Restores and stores the files of a directory by key.

    is_required: whether a directory that cannot be written is an error, because the user named it.
    """

    def __init__(self, folder: CacheFolder, *, is_required: bool = False) -> None:
        self._folder, self._is_required = folder, is_required

    def restore(self, key: Mapping[str, Any], target: Path) -> Restored:
        """Restore the files of `key` in the empty directory `target`.

        Raises ConfigError if they are not restored and a required directory is not writable.
        """
        restored = self._restore(key, target)
        if restored.state != "hit" and self._is_required:
            try:
                self._folder.check_writable()
            except (FolderError, OSError) as error:
                raise ConfigError(
                    f"compile_cache={str(self._folder.path)!r} cannot be used: {error}. Choose "
                    "another directory, or set compile_cache='off'."
                ) from error
        return restored

    def _restore(self, key: Mapping[str, Any], target: Path) -> Restored:
        name = _name(key)
        try:
            fd = self._folder.open(name)
            if fd is None:
                return Restored(state="miss")
            with os.fdopen(fd, "rb") as file:
                data = file.read(MAX_ENTRY_BYTES + 1)
            _unpack(data, key, target)
        except (CacheEntryError, FolderError, OSError) as error:
            logger.warning(
                "Cached code cannot be used and is recompiled: %s: %s.",
                self._folder.path / (name + ENDING),
                error,
            )
            self._folder.drop(name)
            _clear(target)
            return Restored(state="damaged")
        return Restored(state="hit", num_bytes=len(data))

    def store(self, key: Mapping[str, Any], source: Path) -> int:
        """Store all files of `source`. Return the size of the entry, or 0 if that is impossible."""
        try:
            data = _pack(key, source)

            def write(fd: int) -> None:
                with os.fdopen(os.dup(fd), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

            self._folder.store(_name(key), len(data), write)
        except (CacheEntryError, FolderError, OSError) as error:
            logger.warning("Compiled code cannot be cached in %s: %s.", self._folder.path, error)
            return 0
        return len(data)


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.blake2b(_text(key), digest_size=16).hexdigest()


def _text(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _pack(key: Mapping[str, Any], source: Path) -> bytes:
    rows: list[list[object]] = []
    contents: list[bytes] = []
    for path in sorted(source.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        is_executable = bool(path.stat().st_mode & 0o100)
        rows.append([path.relative_to(source).as_posix(), len(data), is_executable])
        contents.append(data)
    index = _text({"key": key, "files": rows})
    rest = b"".join([len(index).to_bytes(_LENGTH_BYTES, "little"), index, *contents])
    if len(rest) + _HEAD_BYTES > MAX_ENTRY_BYTES:
        raise CacheEntryError(f"the files have {len(rest)} bytes, the limit is {MAX_ENTRY_BYTES}")
    return MAGIC + hashlib.sha256(rest).digest() + rest


def _unpack(data: bytes, key: Mapping[str, Any], target: Path) -> None:
    """Write the files of an entry. Raise CacheEntryError before the first file is written.

    Raises OSError if a file cannot be written.
    """
    if not data.startswith(MAGIC) or not _HEAD_BYTES <= len(data) <= MAX_ENTRY_BYTES:
        raise CacheEntryError("the file does not contain compiled code of this version")
    rest = memoryview(data)[len(MAGIC) + _CHECKSUM_BYTES :]
    if hashlib.sha256(rest).digest() != data[len(MAGIC) : len(MAGIC) + _CHECKSUM_BYTES]:
        raise CacheEntryError("the checksum is wrong")
    start = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "little")
    try:
        index = json.loads(bytes(rest[_LENGTH_BYTES:start]))
        rows = [(path, size, flag) for path, size, flag in index["files"]]
        stored_key = index["key"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheEntryError(f"the index of the file cannot be parsed ({error})") from error
    if stored_key != json.loads(_text(key)):
        raise CacheEntryError("the file belongs to another model or configuration")
    if not all(_is_valid_row(*row) for row in rows):
        raise CacheEntryError("the index of the file has an invalid path or size")
    if len(rows) > _MAX_FILES or sum(size for _, size, _ in rows) != len(rest) - start:
        raise CacheEntryError("the index of the file does not match its contents")
    for path, size, is_executable in rows:
        file = target / path
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(rest[start : start + size])
        file.chmod(0o700 if is_executable else 0o600)
        start += size


def _is_valid_row(path: object, size: object, is_executable: object) -> bool:
    if not isinstance(path, str) or "\0" in path or type(size) is not int or size < 0:
        return False
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/")


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
