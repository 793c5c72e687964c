"""The tensors of a model in any format, with the names of its Hugging Face checkpoint.

Weight loaders with the capability "checkpoint_tensors" read files that have these names, and yield
the tensors directly. The tensors that any other weight loader writes to a model are recorded.
A new format therefore needs no code for conversion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dovetail.config.checkpoint_facts import stated_dtype
from dovetail.config.model_directory import ModelDirectory
from dovetail.config.quantized_checkpoints import find_dequantizer
from dovetail.config.resolve import DEFAULT_DTYPE
from dovetail.errors import WeightError
from dovetail.interfaces.config_fields import AUTO
from dovetail.interfaces.model import ModelContext
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.construction import construct
from dovetail.plugins.selection import choose_platform
from dovetail_convert.convert_options import DTYPES, KEEP
from dovetail_convert.recorded_weights import RecordedWeights
from dovetail_convert.shard_writer import PlannedTensor, ShardWriter
from dovetail_torch.layers import TorchLinearMethod, TorchOps
from dovetail_torch.weights.checkpoint_tensors import CHECKPOINT_TENSORS, CheckpointTensor
from dovetail_torch.weights.finiteness import is_finite
from dovetail_torch.weights.safetensors_loader import FLOAT_DTYPES

_FORMAT_FIELD = "load.load_format"
_DEFAULT_FORMAT = "safetensors"
_MAX_MODEL_LEN = 128
"""Any value works: the weights do not depend on the maximum length."""


class CheckpointSource(ABC):
    """The tensors of the checkpoint to write."""

    @abstractmethod
    def plan(self) -> list[PlannedTensor]:
        """Return all tensors. Raise WeightError, naming a tensor, if it cannot be converted."""

    @abstractmethod
    def write(self, writer: ShardWriter, advance: Callable[[], None]) -> None:
        """Write all values. advance: called after each tensor. Raises the errors of `plan`."""


@contextmanager
def open_source(
    directory: ModelDirectory, dtype: str, plugins: PluginRegistry
) -> Iterator[CheckpointSource]:
    """Yield the tensors of a model. dtype: one of `DTYPES`.

    Raises ModelError if no plugin can read the weights or none has the model, and WeightError for
    invalid weights.
    """
    loader = _make_loader(directory, plugins)
    computed = computed_dtype(directory, dtype)
    if CHECKPOINT_TENSORS not in declared_ids(type(loader), "provides"):
        model = _make_model(directory, computed, plugins)
        yield _RecordedSource(RecordedWeights(model), loader)
        return

    def make_model() -> nn.Module | None:
        has_model = plugins.has_model(directory.architecture)
        return _make_model(directory, computed, plugins) if has_model else None

    reader: Any = loader
    with reader.checkpoint_tensors(make_model) as tensors:
        yield _StoredSource(list(tensors), None if dtype == KEEP else computed, computed)


def computed_dtype(directory: ModelDirectory, dtype: str) -> torch.dtype:
    """Return the dtype for values that the checkpoint stores only in quantized form."""
    name = dtype if dtype != KEEP else stated_dtype(directory.config)
    result: torch.dtype = getattr(torch, name if name in DTYPES[1:] else DEFAULT_DTYPE)
    return result


def _make_loader(directory: ModelDirectory, plugins: PluginRegistry) -> WeightLoader:
    """Return the weight loader that an engine would select."""
    reference: str | type | None = directory.defaults.get(_FORMAT_FIELD)
    if reference is None and directory.quantization:
        platform = choose_platform(plugins, AUTO)
        reference = find_dequantizer(directory.quantization, plugins, platform)
    reference = reference or _DEFAULT_FORMAT
    cls = plugins.load("weight_loader", reference)
    options = plugins.options_of("weight_loader", cls)
    context = WeightLoaderContext(
        model_dir=directory.path,
        progress=False,
        quantization=directory.quantization,
        options=options,
    )
    loader: WeightLoader = construct("weight_loader", cls, context)
    return loader


def _make_model(
    directory: ModelDirectory, dtype: torch.dtype, plugins: PluginRegistry
) -> nn.Module:
    """Return the model on the device "meta"."""
    cls = plugins.load("model", directory.architecture)
    device = torch.device("meta")
    context = ModelContext(
        hf_config=directory.config,
        dtype=dtype,
        device=device,
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=_MAX_MODEL_LEN,
        options=plugins.options_of("model", cls),
    )
    with device:
        model: nn.Module = construct("model", cls, context)
    return model


class _StoredSource(CheckpointSource):
    """Tensors that a weight loader yields with the names of the checkpoint.

    requested: the dtype to write; None to keep the dtype of each tensor. computed: the dtype of
    dequantized values.
    """

    def __init__(
        self,
        tensors: Sequence[CheckpointTensor],
        requested: torch.dtype | None,
        computed: torch.dtype,
    ) -> None:
        self._tensors, self._requested, self._computed = tensors, requested, computed

    def plan(self) -> list[PlannedTensor]:
        return [
            PlannedTensor(name=tensor.name, shape=tensor.shape, dtype=self._dtype(tensor))
            for tensor in self._tensors
        ]

    def write(self, writer: ShardWriter, advance: Callable[[], None]) -> None:
        for tensor in self._tensors:
            writer.write(tensor.name, _cast(tensor, self._dtype(tensor)))
            advance()

    def _dtype(self, tensor: CheckpointTensor) -> torch.dtype:
        if tensor.dtype is None:
            return self._computed
        if self._requested is None or not tensor.dtype.is_floating_point:
            return tensor.dtype
        if tensor.dtype not in FLOAT_DTYPES.values():
            raise WeightError(
                f"weight {tensor.name} has the dtype {_name(tensor.dtype)}, which cannot be "
                f"converted to {_name(self._requested)} without scales; set --dtype={KEEP}"
            )
        return self._requested


def _cast(tensor: CheckpointTensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the values, cast to a dtype. Raise WeightError for values that overflow."""
    for piece in tensor.pieces():
        values = piece.to(dtype)
        is_cast = tensor.dtype != dtype and dtype.is_floating_point
        if is_cast and not is_finite(values) and not _has_same_infinities(tensor, piece, values):
            raise WeightError(
                f"weight {tensor.name} has values outside of the range of {_name(dtype)}; "
                "choose another --dtype"
            )
        yield values


def _has_same_infinities(
    tensor: CheckpointTensor, piece: torch.Tensor, values: torch.Tensor
) -> bool:
    """Return whether all NaN and infinite values were in the checkpoint, as in a stored mask."""
    return tensor.dtype is not None and torch.equal(piece.isfinite(), values.isfinite())


class _RecordedSource(CheckpointSource):
    """Tensors that a weight loader writes to a model."""

    def __init__(self, weights: RecordedWeights, loader: WeightLoader) -> None:
        self._weights, self._loader = weights, loader

    def plan(self) -> list[PlannedTensor]:
        return self._weights.plan()

    def write(self, writer: ShardWriter, advance: Callable[[], None]) -> None:
        def receive(name: str, tensor: torch.Tensor) -> None:
            writer.write(name, [tensor])
            advance()

        self._weights.read(self._loader, receive)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
