"""Reads small files of installed distributions: entry points, names, records, manifests.

Each start reads the metadata of all distributions, which may be damaged or hostile. So only regular
files within a size limit are read, and every problem raises ValueError.
"""

from __future__ import annotations

import errno
import os
import stat
from importlib.metadata import Distribution
from pathlib import Path

MAX_ENTRY_POINTS_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20
MAX_HEADER_BYTES = 1 << 18
"""Only this many bytes of METADATA are read, because its first lines contain name and version."""

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})


def read_metadata(
    distribution: Distribution, name: str, *, max_bytes: int, cut: bool = False
) -> str | None:
    """Return the text of a metadata file of a distribution, or None if it does not exist.

    cut: whether to return only the first bytes of a larger file. Raises ValueError for a file that
    is not regular, too large, not UTF-8 (unless cut) or not readable.
    """
    folder = getattr(distribution, "_path", None)
    if isinstance(folder, Path):
        return read_regular_text(folder / name, max_bytes=max_bytes, cut=cut)
    try:
        text: object = distribution.read_text(name)  # an archive, or another finder
    except Exception as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    if text is None or isinstance(text, str):
        return text
    raise ValueError(f"{name} cannot be read: read_text returned {type(text).__name__!r}, not str")


def read_regular_text(path: Path, *, max_bytes: int, cut: bool = False) -> str | None:
    """Return the text of a file, or None if it does not exist.

    Raises the errors of `read_metadata`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _ABSENT:
            return None
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    try:
        content = _read(descriptor, path.name, max_bytes, cut=cut)
    finally:
        os.close(descriptor)
    if content is None:
        return None
    try:
        return content.decode("utf-8", errors="replace" if cut else "strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8: {error}") from None


def _read(descriptor: int, name: str, max_bytes: int, *, cut: bool) -> bytes | None:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name} is not a regular file")
    if status.st_size > max_bytes and not cut:
        raise ValueError(f"{name} has {status.st_size} bytes; the limit is {max_bytes}")
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error}") from None
