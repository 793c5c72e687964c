"""The `safetensors` weight loader: maps one file or several shards and copies one tensor at a time.

All headers are read and compared with the model first, so that a checkpoint of another model is
rejected within milliseconds, before any parameter is written. This module supports any device:
copying a weight into a parameter converts it to the device and dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail_torch.progress_bar import progress_bar
from dovetail_torch.weights.assignment import (
    Target,
    build_weight_table,
)
from dovetail_torch.weights.checkpoint_files import (
    WeightEntry,
    find_weight_files,
    open_weights,
    read_headers,
)
from dovetail_torch.weights.checkpoint_tensors import (
    CHECKPOINT_TENSORS,
    CheckpointTensor,
    MappedFiles,
)
from dovetail_torch.weights.fingerprint import FINGERPRINT, fingerprint_files
from dovetail_torch.weights.tied_weights import untie_different

FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that are cast to one another. Dtypes of up to eight bits need scales and are not cast."""

OTHER_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes that are loaded only into parameters of the same dtype."""


class SafetensorsLoader(WeightLoader):
    """Fills a model from `model.safetensors` or from the shards of `model.safetensors.index.json`.

    Memory: files are mapped, and one weight at a time is copied; the system can drop mapped pages.
    """

    provides: ClassVar[frozenset[str]] = frozenset({CHECKPOINT_TENSORS, FINGERPRINT})

    def __init__(self, context: WeightLoaderContext) -> None:
        """Store `context`, without reading files."""
        self.context = context

    def fingerprint(self) -> str:
        """Return the files' fingerprint; see `dovetail_torch.weights.fingerprint`."""
        return fingerprint_files(find_weight_files(self.context.model_dir))

    def load(self, model: nn.Module) -> int:
        """Fill all parameters in place, cast to their dtypes; return the number of bytes read.

        Tied weights that differ in the files are untied, with a warning. Raises WeightError, before
        any parameter is written, for files that are missing, truncated or inconsistent with their
        index, and for weights that are missing or unexpected or have a wrong shape or a dtype that
        cannot be cast.
        """
        model_dir = self.context.model_dir
        entries = read_headers(find_weight_files(model_dir))
        table = build_weight_table(model)
        if untie_different(model, table, entries):
            table = build_weight_table(model)
        chosen = table.select(entries.keys(), str(model_dir))
        for name, assignment in chosen.items():
            _check_entry(entries[name], assignment)
        return self._read(entries, chosen)

    @contextmanager
    def checkpoint_tensors(
        self, make_model: Callable[[], nn.Module | None]
    ) -> Iterator[list[CheckpointTensor]]:
        """Yield all tensors, unchanged. See `dovetail_torch.weights.checkpoint_tensors`."""
        entries = read_headers(find_weight_files(self.context.model_dir))
        with closing(MappedFiles()) as files:
            yield [
                CheckpointTensor(
                    name=entry.name,
                    shape=entry.shape,
                    dtype=dtype_of(entry),
                    pieces=partial(files.pieces, entry),
                )
                for entry in entries.values()
            ]

    def _read(self, entries: Mapping[str, WeightEntry], chosen: Mapping[str, Target]) -> int:
        """Copy the selected weights, file by file, and return their size in bytes."""
        num_bytes = 0
        plan = [entries[name] for name in chosen]
        with progress_bar("Loading weights", len(plan), shown=self.context.progress) as advance:
            for path, group in groupby(plan, key=lambda entry: entry.path):
                with open_weights(path) as handle:
                    num_bytes += sum(_copy(handle, chosen, entry.name, advance) for entry in group)
        return num_bytes


@torch.no_grad()
def _copy(handle: Any, chosen: Mapping[str, Target], name: str, advance: Callable[[], None]) -> int:
    """Copy one weight from its mapped file to its target and return the bytes read."""
    # A mapped tensor keeps its mapping alive after the handle is closed. Unread pages are not
    # loaded.
    num_bytes = chosen[name].fill(handle.get_tensor(name), is_mapped=True)
    advance()
    return num_bytes


def dtype_of(entry: WeightEntry) -> torch.dtype:
    """Return the dtype of a tensor. Raise WeightError if torch does not have it."""
    dtype = (FLOAT_DTYPES | OTHER_DTYPES).get(entry.dtype)
    if dtype is None:
        raise WeightError(
            f"{entry.path}: weight {entry.name} has the dtype {entry.dtype}, which is not supported"
        )
    return dtype


def _check_entry(entry: WeightEntry, assignment: Target) -> None:
    assignment.check(entry.shape, str(entry.path))
    dtype = assignment.target.dtype
    if entry.dtype in FLOAT_DTYPES and dtype in FLOAT_DTYPES.values():
        return
    if OTHER_DTYPES.get(entry.dtype) is dtype:
        return
    raise WeightError(
        f"{entry.path}: weight {entry.name} has the dtype {entry.dtype}, which cannot be cast to "
        f"the model's dtype {dtype}: a quantized checkpoint needs a linear method that supports it"
    )
