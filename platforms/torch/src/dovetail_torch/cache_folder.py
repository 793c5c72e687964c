"""A directory of cache files on disk: its path, owner, files and size limit.

This module handles names, sizes and times of files, not their contents. This module rejects
symbolic links, and directories and files that another user could have written.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PART_ENDING = ".part"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class FolderError(Exception):
    """The directory, or a file in it, cannot be trusted. The message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class CacheFolder:
    """A directory that only this user writes to.

    max_bytes: limit for all files together. ending: the suffix of the names of its files.
    """

    path: Path
    max_bytes: int
    ending: str

    def names(self) -> list[str]:
        """Return the names of all files, the most recently used one first."""
        times = []
        for path in self.path.glob(f"*{self.ending}"):
            with suppress(OSError):  # deleted meanwhile
                times.append((path.lstat().st_mtime_ns, path.name.removesuffix(self.ending)))
        return [name for _, name in sorted(times, reverse=True)]

    def open(self, name: str, *, marks_use: bool = True) -> int | None:
        """Return a descriptor for reading the file `name`, or None if the file does not exist.

        marks_use: whether the file is marked as used now. Raises FolderError for a file of another
        user, and OSError if the file cannot be opened.
        """
        if not self.path.exists():
            return None
        self._check()
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self.path / (name + self.ending), flags)
        except FileNotFoundError:
            return None
        try:
            _check_owner(os.fstat(fd), stat.S_ISREG, f"{name}{self.ending}")
            if marks_use:
                with suppress(OSError):  # on a read-only disk the file is still readable
                    os.utime(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def check_writable(self) -> None:
        """Create the directory if needed. Raise FolderError or OSError if it is not writable."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check()
        fd, part = self._create_part("check")
        os.close(fd)
        part.unlink(missing_ok=True)

    def store(self, name: str, num_bytes: int, write: Callable[[int], None]) -> None:
        """Create the file `name` by `write(descriptor)` atomically. Delete the oldest files.

        Raises FolderError for a directory of another user or a file beyond the limit, OSError if
        the disk fails.
        """
        if num_bytes > self.max_bytes:
            raise FolderError(f"{num_bytes} bytes exceed the limit of {self.max_bytes} bytes")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check()
        self._drop_leftovers()
        self._delete_old(num_bytes)
        fd, part = self._create_part(name)
        try:
            write(fd)
            part.rename(self.path / (name + self.ending))
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _create_part(self, name: str) -> tuple[int, Path]:
        """Create a temporary file, locked while it is open, so that no process deletes it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            part = self.path / f"{name}.{secrets.token_hex(8)}{_PART_ENDING}"
            fd = os.open(part, flags, 0o600)
            with suppress(OSError):  # without locks, no process deletes temporary files
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd, part
            os.close(fd)  # another process deleted it before it was locked

    def drop(self, name: str) -> None:
        """Delete the file `name`, if possible."""
        with suppress(OSError):
            (self.path / (name + self.ending)).unlink()

    def _check(self) -> None:
        _check_owner(os.lstat(self.path), stat.S_ISDIR, str(self.path))

    def _delete_old(self, num_bytes: int) -> None:
        """Delete the least recently used files until there is space for `num_bytes` more."""
        files = []
        for path in self.path.glob(f"*{self.ending}"):
            with suppress(OSError):  # deleted meanwhile
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    files.append((status, path))
        files.sort(key=lambda pair: pair[0].st_mtime_ns)
        total = sum(status.st_size for status, _ in files)
        for status, path in files:
            if total + num_bytes <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size

    def _drop_leftovers(self) -> None:
        """Delete temporary files that no process has locked: their writers have exited."""
        for part in self.path.glob(f"*{_PART_ENDING}"):
            with suppress(OSError):  # locked, or deleted by another process
                fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    part.unlink(missing_ok=True)
                finally:
                    os.close(fd)


def _check_owner(status: os.stat_result, is_kind: Callable[[int], bool], name: str) -> None:
    if not is_kind(status.st_mode):
        raise FolderError(f"{name} is a link or has an unexpected type")
    if status.st_uid != os.geteuid():
        raise FolderError(f"{name} belongs to user {status.st_uid}, not to you")
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise FolderError(f"other users may write to {name}: run chmod go-w, or delete it")


def user_cache_folder(name: str) -> Path:
    """Return the directory `name` in the user's cache directory (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: ignore a path that is not absolute.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "dovetail" / name
