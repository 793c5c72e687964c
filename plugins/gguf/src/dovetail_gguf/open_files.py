"""Opens a GGUF file once per startup, for the configuration, the tokenizer and the weight loader.

Reading the vocabulary from the metadata takes 0.1 s.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from dovetail.errors import ModelError
from dovetail_gguf.reader import GGUFFile

Versions = list[tuple[int, int, int, int]]

_RECENT_NS = 2_000_000_000
"""Time after a change, in ns, in which a second change may leave the time stamp unchanged."""


def open_file(path: Path) -> GGUFFile:
    """Return the GGUF model at `path`. Read it again only if one of its files has changed.

    Raises a ModelError that names the file if it is unreadable, damaged or not supported.
    """
    file, versions = _open_file(path)
    if versions != _versions(file) or _is_recent(versions):
        _open_file.cache_clear()
        file, _ = _open_file(path)
    return file


@lru_cache(maxsize=1)
def _open_file(path: Path) -> tuple[GGUFFile, Versions]:
    file = GGUFFile(path)
    return file, _versions(file)


def _versions(file: GGUFFile) -> Versions:
    """Return device, inode, size and modification time of each part."""
    versions = []
    for path in file.paths:
        try:
            versions.append(path.stat())
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    return [(item.st_dev, item.st_ino, item.st_size, item.st_mtime_ns) for item in versions]


def _is_recent(versions: Versions) -> bool:
    newest = max(modified_ns for *_, modified_ns in versions)
    return time.time_ns() - newest < _RECENT_NS
