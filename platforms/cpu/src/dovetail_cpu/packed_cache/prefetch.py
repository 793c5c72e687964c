"""Reads a model's packed weights in the background, before torch is imported.

The import of torch takes about a second of one core. Meanwhile another core maps the packed weights
and verifies their checksums, so that the worker finds them in memory. The file is the most recently
used one with the fingerprint of the weights. This module does not import torch.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from dovetail.errors import DovetailError
from dovetail_cpu.packed_cache.packed_file import PackedFile, PackedFileError, map_packed
from dovetail_torch.cache_folder import CacheFolder, FolderError
from dovetail_torch.weights.checkpoint_files import find_weight_files
from dovetail_torch.weights.fingerprint import fingerprint_files

_MAX_FILES = 8
"""How many of the most recently used files are compared with the model."""
_FAILURES = (DovetailError, FolderError, PackedFileError, OSError)


class PackedPrefetch:
    """Packed weights that a thread reads. `take` or `cancel` is called once, by the worker.

    model_dir: a directory with safetensors files. num_threads: threads that verify checksums.
    """

    def __init__(self, folder: CacheFolder, model_dir: Path, *, num_threads: int) -> None:
        """Start the thread."""
        self._folder, self._model_dir, self._num_threads = folder, model_dir, num_threads
        self._file: PackedFile | None = None
        self._is_selected = threading.Event()
        self._is_cancelled = False
        self._thread = threading.Thread(
            target=self._read, name="dovetail-packed-prefetch", daemon=True
        )
        self._thread.start()

    def take(self, fd: int) -> PackedFile | None:
        """Return the verified packed weights if they are those of the open file `fd`, else None.

        Waits for the verification. None also if it failed, so that the caller reads the file itself
        and reports the reason.
        """
        self._is_selected.wait()
        file = self._file
        if file is None or file.identity != _identity_of(fd):
            self.cancel()
            return None
        self._thread.join()
        self._file, verified = None, self._file
        return verified

    def cancel(self) -> None:
        """Stop reading, and release the memory."""
        self._is_cancelled = True
        self._file = None

    def _read(self) -> None:
        try:
            with suppress(*_FAILURES):
                self._file = self._select()
        finally:
            self._is_selected.set()
        file = self._file
        if file is None:
            return
        try:
            file.verify(self._num_threads, is_cancelled=lambda: self._is_cancelled)
        except _FAILURES:
            self._file = None

    def _select(self) -> PackedFile | None:
        """Map the most recently used file of these weights, or return None."""
        if not self._folder.path.exists():
            return None
        fingerprint = fingerprint_files(find_weight_files(self._model_dir))
        files = map(self._map, self._folder.names()[:_MAX_FILES])
        return next((file for file in files if file and _is_of(file, fingerprint)), None)

    def _map(self, name: str) -> PackedFile | None:
        """Map the file `name`. Return None if it cannot be used; the worker reports the reason."""
        with suppress(*_FAILURES):
            fd = self._folder.open(name, marks_use=False)
            if fd is not None:
                try:
                    return map_packed(fd)
                finally:
                    os.close(fd)
        return None


def _is_of(file: PackedFile, fingerprint: str) -> bool:
    return isinstance(file.key, dict) and file.key.get("weights") == fingerprint


def _identity_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
