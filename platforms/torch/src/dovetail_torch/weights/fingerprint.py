"""What tells one set of weight files from another, without reading all of them.

A fingerprint is made of sizes, times of the last change, headers and samples of the contents, and
of nothing that depends on where the files lie. It is not a defence against somebody who wants two
checkpoints to look the same: whoever can write there can replace the weights themselves.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from dovetail.errors import WeightError
from dovetail_torch.weights.checkpoint_files import MAX_HEADER_BYTES, open_weight_file

FINGERPRINT = "fingerprint"
"""Capability id of weight loaders that are `Fingerprinted`."""

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEADER_LENGTH_BYTES = 8


class Fingerprinted(Protocol):
    """Capability "fingerprint" of a weight loader: it can say which weights it would load."""

    def fingerprint(self) -> str:
        """Return a text that changes with the weights; nothing is loaded.

        Raises WeightError where `load` would, as far as the files' names and headers go.
        """


def fingerprint_files(paths: Iterable[Path]) -> str:
    """Return the fingerprint of safetensors files, in the order given: 32 hexadecimal digits.

    Reads each file's header and 64 samples of 4 KiB. Raises WeightError for one that is not there.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with open_weight_file(path) as descriptor:
                _add_file(digest, descriptor)
        except OSError as error:
            raise WeightError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, fd: int) -> None:
    facts = os.fstat(fd)
    length = os.pread(fd, _HEADER_LENGTH_BYTES, 0)
    # A length that cannot be is the loader's to refuse; here it must only not take all memory.
    header_bytes = min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)
    digest.update(f"{facts.st_size}/{facts.st_mtime_ns}/".encode() + length)
    digest.update(os.pread(fd, header_bytes, _HEADER_LENGTH_BYTES))
    step = max(_SAMPLE_BYTES, facts.st_size // _NUM_SAMPLES)
    for offset in range(0, facts.st_size, step):
        digest.update(os.pread(fd, _SAMPLE_BYTES, offset))
