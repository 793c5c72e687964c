"""Opens a quantized checkpoint and chooses the tensors that a model needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dovetail.config.checkpoint_quantization import read_quantization
from dovetail.errors import ModelError, WeightError
from dovetail.interfaces.weight_loader import WeightLoaderContext
from dovetail.model_files import read_json_object
from dovetail_quantized_checkpoints.exclusions import Exclusions, check_modules
from dovetail_quantized_checkpoints.formats.awq import AWQ
from dovetail_quantized_checkpoints.formats.base import Format, ModuleTensors
from dovetail_quantized_checkpoints.formats.bitsandbytes import BitsAndBytes
from dovetail_quantized_checkpoints.formats.compressed_tensors import CompressedTensors
from dovetail_quantized_checkpoints.formats.fp8 import FP8
from dovetail_quantized_checkpoints.formats.gptq import GPTQ
from dovetail_quantized_checkpoints.formats.mxfp4 import MXFP4
from dovetail_quantized_checkpoints.stored_weight import StoredExperts, StoredWeight
from dovetail_torch.weights import Target, WeightTable, build_weight_table, untie_different
from dovetail_torch.weights.checkpoint_files import (
    WeightEntry,
    find_weight_files,
    open_weights,
    read_headers,
)
from dovetail_torch.weights.checkpoint_tensors import CheckpointTensor, MappedFiles
from dovetail_torch.weights.safetensors_loader import FLOAT_DTYPES, dtype_of

FORMATS: dict[str, type[Format]] = {
    "awq": AWQ,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "gptq": GPTQ,
    "mxfp4": MXFP4,
}
"""The formats by the `quant_method` of a checkpoint."""
CONFIG_FILE = "config.json"
KEPT_DTYPES = (*FLOAT_DTYPES, "I64", "BOOL")
"""Dtypes of tensors that are not quantized."""


class Checkpoint:
    """The tensors of an open checkpoint. modules: quantized modules, by the name of the weight."""

    def __init__(
        self, form: Format, entries: Mapping[str, WeightEntry], handles: Mapping[Path, Any]
    ) -> None:
        self._form, self._entries, self._handles = form, entries, handles
        self.modules = dict(_quantized_modules(form, entries))
        owned = {
            f"{module.prefix}{leaf}" for module in self.modules.values() for leaf in module.entries
        }
        self._plain = {name: entry for name, entry in entries.items() if name not in owned}

    def check(self, model_dir: Path, exclusions: Exclusions) -> None:
        """Raise WeightError if the configuration does not match the set of quantized modules."""
        if not self.modules and self._form.quantizes_all:
            raise WeightError(
                f"{model_dir}: config.json declares a quantization, but no weight is quantized: no "
                f"name ends with {' or '.join(self._form.marks)}. Remove quantization_config from "
                "config.json, or use another checkpoint"
            )
        quantized = {
            module.prefix.removesuffix("."): next(iter(module.entries.values()))
            for module in self.modules.values()
        }
        is_all = self._form.quantizes_all
        check_modules(exclusions, quantized, self._plain.values(), are_all=is_all)

    def read(self, name: str) -> torch.Tensor:
        """Return a stored tensor, memory-mapped."""
        tensor: torch.Tensor = self._handles[self._entries[name].path].get_tensor(name)
        return tensor

    def open(self, name: str) -> StoredWeight | StoredExperts:
        """Return the quantized weight `name`."""
        return self._form.open(self.modules[name], self.read)

    def num_bytes(self, name: str) -> int:
        """Return the size of all tensors of a quantized weight in the files."""
        module = self.modules[name]
        return sum(self.read(f"{module.prefix}{leaf}").nbytes for leaf in module.entries)

    def choose(self, model: nn.Module) -> dict[str, Target]:
        """Return the target of each weight that must be read, by name. Check the shapes."""
        table = build_weight_table(model)
        if untie_different(model, table, self._plain):
            table = build_weight_table(model)
        if tied := sorted(table.aliases.keys() & self.modules):
            path = next(iter(self.modules[tied[0]].entries.values())).path
            raise WeightError(
                f"{path}: {tied[0]} is quantized, but config.json ties it to "
                f"{table.aliases[tied[0]]}; set tie_word_embeddings to false if they differ"
            )
        names = [*(name for name in self._plain if self._is_needed(name, table)), *self.modules]
        chosen = table.select(names, str(next(iter(self._handles))))
        for name, target in chosen.items():
            if name in self.modules:
                module = self.modules[name]
                path = next(iter(module.entries.values())).path
                target.check(self._form.shape(module, self.read), str(path))
            else:
                self._check_plain(self._plain[name], target)
        return chosen

    def tensors(self, files: MappedFiles, model: nn.Module | None) -> Iterator[CheckpointTensor]:
        """Yield all tensors of the checkpoint, dequantized, in the order of the files.

        files: reads the values. model: the model of the checkpoint, or None if no plugin has it.
        Raises WeightError for a weight that cannot be dequantized.
        """
        table = None if model is None else build_weight_table(model)
        owners = {
            f"{module.prefix}{leaf}": name
            for name, module in self.modules.items()
            for leaf in module.entries
        }
        for name in dict.fromkeys(owners.get(name, name) for name in self._entries):
            if name in self.modules:
                yield self._dequantized(name, files)
            elif table is None or self._is_needed(name, table):
                yield self._unquantized(self._entries[name], files)

    def _dequantized(self, name: str, files: MappedFiles) -> CheckpointTensor:
        module = self.modules[name]
        self._form.open(module, self.read)  # raises if scales or groups are wrong

        def pieces() -> Iterator[torch.Tensor]:
            stored = self._form.open(module, lambda own: files.read(self._entries[own]))
            return stored.pieces()

        shape = self._form.shape(module, self.read)
        return CheckpointTensor(name=name, shape=shape, dtype=None, pieces=pieces)

    def _unquantized(self, entry: WeightEntry, files: MappedFiles) -> CheckpointTensor:
        if entry.dtype not in KEPT_DTYPES:
            raise _without_scales(entry)
        dtype = dtype_of(entry)
        pieces = partial(files.pieces, entry)
        return CheckpointTensor(name=entry.name, shape=entry.shape, dtype=dtype, pieces=pieces)

    def _is_needed(self, name: str, table: WeightTable) -> bool:
        """Return whether a tensor that is not quantized must be loaded.

        GPTQ checkpoints contain all-zero biases that the model does not have; these are skipped.
        """
        prefix, _, leaf = name.rpartition(".")
        if leaf != "bias" or f"{prefix}.weight" not in self.modules:
            return True
        is_known = all(own in table.assignments for own in table.names.to_model(name)[0])
        return is_known or bool(self.read(name).any())

    def _check_plain(self, entry: WeightEntry, target: Target) -> None:
        target.check(entry.shape, str(entry.path))
        if entry.dtype not in FLOAT_DTYPES:
            raise _without_scales(entry)


def _without_scales(entry: WeightEntry) -> WeightError:
    return WeightError(
        f"{entry.path}: weight {entry.name} has the dtype {entry.dtype}, but no tensors with its "
        "scales: the checkpoint is incomplete"
    )


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The quantization of a checkpoint. method: one of `FORMATS`. table: its configuration."""

    method: str
    table: Mapping[str, Any]


def read_format(context: WeightLoaderContext) -> Quantization:
    """Return the quantization that the context states, else that of the model's JSON files.

    Raises WeightError for a method without a format, and for invalid JSON files.
    """
    model_dir, stated = context.model_dir, context.quantization
    try:
        if stated is None:
            stated = read_quantization(model_dir, read_json_object(model_dir / CONFIG_FILE))
    except ModelError as error:
        raise WeightError(str(error)) from None
    method = stated.get("method", "")
    if method not in FORMATS:
        raise WeightError(
            f"{model_dir}: the checkpoint is not quantized with one of {', '.join(FORMATS)}; "
            "use load_format='safetensors'"
        )
    return Quantization(method=method, table=_json_values(stated["config"]))


def _json_values(value: Any) -> Any:
    """Return frozen values as json.loads returns them, with lists instead of tuples."""
    if isinstance(value, Mapping):
        return {str(key): _json_values(inner) for key, inner in value.items()}
    return [_json_values(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def open_checkpoint(context: WeightLoaderContext) -> Iterator[Checkpoint]:
    """Yield the checkpoint. The files are closed at the end; mapped tensors stay valid."""
    quantization, model_dir = read_format(context), context.model_dir
    form = FORMATS[quantization.method](quantization.table)
    exclusions = Exclusions(quantization.method, quantization.table)
    files = find_weight_files(model_dir)
    entries = read_headers(files)
    with ExitStack() as stack:
        handles = {path: stack.enter_context(open_weights(path)) for path in files}
        checkpoint = Checkpoint(form, entries, handles)
        checkpoint.check(model_dir, exclusions)
        yield checkpoint


def _quantized_modules(
    form: Format, entries: Mapping[str, WeightEntry]
) -> Iterator[tuple[str, ModuleTensors]]:
    """Yield the quantized modules by the name of their weight."""
    tensors: defaultdict[str, dict[str, WeightEntry]] = defaultdict(dict)
    marked: dict[str, None] = {}
    for name, entry in entries.items():
        if (parts := form.split(name)) is None:
            continue
        prefix, leaf = parts
        tensors[prefix][leaf] = entry
        if name.endswith(form.marks):
            marked[prefix] = None
    for prefix in marked:
        yield form.weight_name(prefix), ModuleTensors(prefix=prefix, entries=tensors[prefix])
