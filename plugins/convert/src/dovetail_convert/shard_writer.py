"""Writes tensors to safetensors files of a limited size, and the index of these files.

The position of every tensor is known before the first one is written, so tensors may be written in
any order. Values are written in pieces, so that a file may be larger than the memory.
Source of the format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.errors import ConfigError, WeightError
from dovetail_torch.weights.checkpoint_files import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    MAX_SHARDS,
    SINGLE_FILE,
)
from dovetail_torch.weights.safetensors_loader import FLOAT_DTYPES, OTHER_DTYPES

_NAMES = {dtype: name for name, dtype in (FLOAT_DTYPES | OTHER_DTYPES).items()}
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a tensor is written. start: the offset in the file, in bytes."""

    tensor: PlannedTensor
    path: Path
    start: int


class ShardWriter:
    """Writes planned tensors to files in an empty directory.

    Raises ConfigError if there would be too many files, and WeightError for a header that is too
    long.
    """

    def __init__(
        self, folder: Path, tensors: Sequence[PlannedTensor], max_shard_bytes: int
    ) -> None:
        shards = list(_divide(tensors, max_shard_bytes))
        if len(shards) > MAX_SHARDS:
            raise ConfigError(
                f"--max-shard-size: the checkpoint would have {len(shards)} files with weights, at "
                f"most {MAX_SHARDS} are supported. Choose a larger size."
            )
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self._missing = {tensor.name for tensor in tensors}
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._create(folder / (SINGLE_FILE if len(shards) == 1 else name), shard)
        self._num_files = len(shards)

    @property
    def num_files(self) -> int:
        """Number of files with weights."""
        return self._num_files

    def _create(self, path: Path, shard: Sequence[PlannedTensor]) -> None:
        """Create a file with its header, and with its final size."""
        # Values of larger dtypes come first, which aligns all values.
        shard = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
        header, end = _header(shard), 0
        if len(header) > MAX_HEADER_BYTES:
            raise WeightError(
                f"{path.name}: the names of {len(shard)} tensors need a header of {len(header)} "
                f"bytes, at most {MAX_HEADER_BYTES} are supported"
            )
        first = len(header) + _ALIGNMENT
        for tensor in shard:
            self._places[tensor.name] = _Place(tensor=tensor, path=path, start=first + end)
            end += tensor.num_bytes
        with path.open("xb") as file:
            file.write(len(header).to_bytes(_ALIGNMENT, "little") + header)
            file.truncate(first + end)

    def write(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write a tensor. pieces: its values in row-major order, of the planned dtype.

        Raises WeightError if it was written before, or has another number of values.
        """
        place = self._places[name]
        if name not in self._missing:
            raise WeightError(
                f"the weight loader provided {name} twice: this is a bug in the loader"
            )
        self._missing.remove(name)
        num_bytes = 0
        with place.path.open("r+b", buffering=0) as file:
            file.seek(place.start)
            for piece in pieces:
                assert piece.dtype == place.tensor.dtype
                num_bytes += piece.nbytes
                if num_bytes <= place.tensor.num_bytes:
                    _write_all(file.fileno(), piece)
        if num_bytes != place.tensor.num_bytes:
            raise WeightError(
                f"weight {name} has {num_bytes} bytes, expected {place.tensor.num_bytes}: the "
                "checkpoint changed while it was read, or the weight loader has a bug"
            )

    def finish(self) -> None:
        """Write the index if there are several files, and fsync all files.

        Raises WeightError, naming it, for a tensor that was not written.
        """
        if self._missing:
            names = sorted(self._missing)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise WeightError(
                f"the weight loader did not provide {names[0]}{more}: the checkpoint is "
                "incomplete, or the weight loader does not copy these weights"
            )
        if self._num_files > 1:
            total = sum(place.tensor.num_bytes for place in self._places.values())
            content = {
                "metadata": {"total_size": total},
                "weight_map": {name: place.path.name for name, place in self._places.items()},
            }
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (self._folder / INDEX_FILE).write_text(f"{text}\n", "utf-8")
        for path in self._folder.iterdir():
            _synchronize(path)


def _divide(
    tensors: Sequence[PlannedTensor], max_shard_bytes: int
) -> Iterable[list[PlannedTensor]]:
    """Yield the tensors of each file. A tensor above the size limit gets its own file."""
    shard: list[PlannedTensor] = []
    num_bytes = 0
    for tensor in tensors:
        if shard and num_bytes + tensor.num_bytes > max_shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(tensor)
        num_bytes += tensor.num_bytes
    yield shard


def _header(shard: Sequence[PlannedTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in shard:
        end = start + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)


def _write_all(descriptor: int, piece: torch.Tensor) -> None:
    memory = memoryview(piece.contiguous().reshape(-1).view(torch.uint8).numpy())
    while memory:
        memory = memory[os.write(descriptor, memory) :]


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
