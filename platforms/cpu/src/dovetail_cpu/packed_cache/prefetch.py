"""Reads a model's packed weights in the background, before torch is imported.

The import of torch takes about a second of one core. Meanwhile another core maps the packed weights
and verifies their checksums, so that the worker finds them in memory. The file is the most recently
used one for weight files with these sizes and times. This module does not import torch.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path

from dovetail.errors import DovetailError
from dovetail_cpu.packed_cache.packed_file import PackedFile, PackedFileError, map_packed
from dovetail_torch.cache_folder import CacheFolder, FolderError

_MAX_FILES = 8
"""How many of the most recently used files are compared with the model."""
_MAX_ENTRIES = 10_000
_WEIGHT_ENDINGS = (".safetensors", ".gguf")
_FAILURES = (DovetailError, FolderError, PackedFileError, OSError)


class PackedPrefetch:
    """Packed weights that a thread verifies. num_threads: threads that verify checksums."""

    def __init__(self, file: PackedFile, *, num_threads: int) -> None:
        """Start the thread."""
        self._file: PackedFile | None = file
        self._identity, self._num_threads = file.identity, num_threads
        self._is_cancelled = self._is_verified = False
        self._thread = threading.Thread(
            target=self._verify, args=(file,), name="dovetail-packed-prefetch", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the limit on threads may be reached; the worker reads the file
            self._file = None

    def take(self, fd: int) -> PackedFile | None:
        """Return the verified packed weights if they are those of the open file `fd`, else None.

        Waits for the verification. None also if it failed, so that the caller reads the file itself
        and reports the reason.
        """
        if self._file is None or self._identity != _identity_of(fd):
            self.cancel()
            return None
        self._thread.join()
        self._file, file = None, self._file
        return file if self._is_verified else None

    def cancel(self) -> None:
        """Stop reading, and release the memory, unless `take` has returned it."""
        self._is_cancelled = True
        self._file = None

    def _verify(self, file: PackedFile) -> None:
        try:
            file.verify(self._num_threads, is_cancelled=lambda: self._is_cancelled)
        except (*_FAILURES, MemoryError):
            self._file = None
        else:
            self._is_verified = True


def find_packed(folder: CacheFolder, model_dir: Path) -> PackedFile | None:
    """Map the most recently used file of the weights in `model_dir`, or return None.

    Files that cannot be used are skipped; the worker reports the reason.
    """
    with suppress(*_FAILURES):
        files = weight_files(model_dir)
        for name in folder.names()[:_MAX_FILES] if files else ():
            file = _map(folder, name)
            if file is not None and isinstance(file.key, dict) and file.key.get("files") == files:
                return file
    return None


def weight_files(model_dir: Path) -> list[list[int]]:
    """Return the size and modification time (ns) of each weight file, in the order of the names.

    model_dir: a directory, or a file. Returns [] if it cannot be read.
    """
    try:
        if model_dir.is_file():
            paths = [model_dir]
        else:
            entries = islice(model_dir.iterdir(), _MAX_ENTRIES)
            paths = sorted(path for path in entries if path.suffix in _WEIGHT_ENDINGS)
        return [[status.st_size, status.st_mtime_ns] for status in map(os.stat, paths)]
    except OSError:
        return []


def _map(folder: CacheFolder, name: str) -> PackedFile | None:
    with suppress(*_FAILURES):
        fd = folder.open(name, marks_use=False)
        if fd is not None:
            try:
                return map_packed(fd)
            finally:
                os.close(fd)
    return None


def _identity_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
