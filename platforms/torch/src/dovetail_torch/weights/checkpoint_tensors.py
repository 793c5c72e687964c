"""The interface of loaders that read the tensors of a checkpoint without a model.

Only loaders of files with the names of Hugging Face checkpoints implement it. Values are read in
pieces, so that neither the checkpoint nor one of its tensors must fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dovetail_torch.weights.checkpoint_files import WeightEntry, open_weights

CHECKPOINT_TENSORS = "checkpoint_tensors"
"""Capability id of loaders that implement `ReadsCheckpointTensors`; declared in `provides`."""

PIECE_VALUES = 1 << 22
"""Number of values that are read at the same time."""
MAX_MAPPED_BYTES = 256 << 20
"""Bytes that are read from a mapping before the file is remapped."""


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """One tensor of a checkpoint. name: as in a Hugging Face checkpoint.

    dtype: as stored; None if the tensor is quantized, so that its values are computed. pieces:
    returns the values in row-major order, in pieces of any shape; it may raise WeightError.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    pieces: Callable[[], Iterator[torch.Tensor]]


class ReadsCheckpointTensors(Protocol):
    """Capability "checkpoint_tensors": the loader can read the checkpoint without its model."""

    def checkpoint_tensors(
        self, make_model: Callable[[], nn.Module | None]
    ) -> AbstractContextManager[Iterable[CheckpointTensor]]:
        """Return a context manager that yields all tensors, in the order that is fastest to read.

        make_model: returns the model of the checkpoint on the device "meta"; None if no installed
        plugin has it. The tensors are valid in the context only. Raises the errors of `load`.
        """


class MappedFiles:
    """Reads tensors of safetensors files, of which one at a time is mapped.

    The file is remapped after `MAX_MAPPED_BYTES`, which removes the pages that were read from
    the memory of the process.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._path: Path | None = None
        self._handle: Any = None
        self._num_bytes = 0

    def read(self, entry: WeightEntry) -> torch.Tensor:
        """Return a mapped tensor. It stays valid when another one is read."""
        if entry.path != self._path or self._num_bytes > MAX_MAPPED_BYTES:
            self.close()
            self._handle = self._stack.enter_context(open_weights(entry.path))
            self._path = entry.path
        tensor: torch.Tensor = self._handle.get_tensor(entry.name)
        self._num_bytes += tensor.nbytes
        return tensor

    def pieces(self, entry: WeightEntry) -> Iterator[torch.Tensor]:
        """Yield the values of a tensor, unchanged."""
        yield from self.read(entry).reshape(-1).split(PIECE_VALUES)

    def close(self) -> None:
        """Close the file. Mapped tensors stay valid."""
        self._handle, self._path, self._num_bytes = None, None, 0
        self._stack.close()
