"""A fingerprint that distinguishes sets of weight files without reading them completely.

A fingerprint consists of sizes, modification times, headers and samples of the contents, and does
not depend on the path of the files. It does not protect against files that are crafted to have the
same fingerprint, because a user who can write to the directory can also replace the weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from dovetail.errors import WeightError
from dovetail_torch.weights.checkpoint_files import MAX_HEADER_BYTES, open_weight_file

FINGERPRINT = "fingerprint"
"""Capability id of weight loaders that implement `Fingerprinted`."""

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEADER_LENGTH_BYTES = 8


class Fingerprinted(Protocol):
    """Capability "fingerprint" of a weight loader: it can identify the weights to load."""

    def fingerprint(self) -> str:
        """Return a hash (str) that differs if the weights differ, without loading the weights.

        Covers everything that decides the values that `load` writes, also configuration.
        Raises WeightError as `load` would for problems with file names and headers.
        """


def fingerprint_files(paths: Iterable[Path], header_bytes: Mapping[Path, int] | None = None) -> str:
    """Return the fingerprint of weight files, in the order given: 32 hexadecimal digits.

    header_bytes: size of each file's header; None for safetensors files, which begin with this
    size. Reads each file's header and 64 samples of 4 KiB. Raises WeightError for a missing file.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with open_weight_file(path) as descriptor:
                _add_file(digest, descriptor, header_bytes[path] if header_bytes else None)
        except OSError as error:
            raise WeightError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, fd: int, header_bytes: int | None) -> None:
    status = os.fstat(fd)
    length = os.pread(fd, _HEADER_LENGTH_BYTES, 0)
    if header_bytes is None:
        header_bytes = int.from_bytes(length, "little")
    # The loader rejects invalid lengths; this limit only bounds the memory.
    header_bytes = min(header_bytes, MAX_HEADER_BYTES)
    digest.update(f"{status.st_size}/{status.st_mtime_ns}/".encode() + length)
    digest.update(os.pread(fd, header_bytes, _HEADER_LENGTH_BYTES))
    step = max(_SAMPLE_BYTES, status.st_size // _NUM_SAMPLES)
    for offset in range(0, status.st_size, step):
        digest.update(os.pread(fd, _SAMPLE_BYTES, offset))
