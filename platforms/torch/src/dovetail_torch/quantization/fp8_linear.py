"""The linear method `fp8`: weights are rounded to float8_e4m3fn while they are loaded.

On a device, the codes and scales are stored, which needs half of the memory of bfloat16; each step
computes the values of a layer before its matrix product. In host memory no kernel reads such codes:
the values are written to the unquantized weight, which another linear method packs and applies.
Activations are not rounded. `fp8_rounding` defines codes and scales.
Dimensions: T tokens, I input features, O output features, Q scales of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from dovetail.errors import ConfigError
from dovetail.interfaces.linear_method import EXPERTS, ExpertLayers, LinearMethod, LinearShape
from dovetail.interfaces.model import RankGroup
from dovetail.interfaces.ops import ExpertWeights
from dovetail.value_checks import shorten
from dovetail_torch.distributed.shard import Shard
from dovetail_torch.layers.embedding import ParallelLMHead
from dovetail_torch.layers.torch_linear import TorchLinearMethod
from dovetail_torch.lazy_memory import is_host_memory
from dovetail_torch.quantization.fp8_rounding import decode, decode_to, round_weight
from dovetail_torch.quantization.inner_method import INNER_METHOD
from dovetail_torch.quantization.options import FP8Options

logger = logging.getLogger(__name__)


class FP8LinearMethod(LinearMethod):
    """Rounds weights to float8_e4m3fn. inner: applies the weights that are not stored as codes."""

    error: ClassVar[float] = 0.3
    provides: ClassVar[frozenset[str]] = frozenset({EXPERTS, INNER_METHOD})

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = FP8Options(**(options or {}))
        self._block = self._options.block_size if self._options.scales == "block" else 0
        self._unmatched = dict.fromkeys(self._options.ignored_layers)
        self._has_started = False
        self._inner: LinearMethod = TorchLinearMethod()

    @property
    def inner(self) -> LinearMethod:
        """The method that applies the weights that are not stored as codes."""
        return self._inner

    @inner.setter
    def inner(self, method: LinearMethod) -> None:
        if EXPERTS in type(method).provides:
            self._inner = method

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register `weight` and `bias` as in the checkpoint.

        Raises ConfigError if `ignored_layers` names a part of a fused layer only, or if a
        block is split between ranks.
        """
        layer.fp8_shape = shape
        layer.is_rounded = self._is_rounded(layer, shape)
        layer.fp8_method = self._inner
        if layer.is_rounded:
            self._check_blocks(layer, shape)
            if not is_host_memory(shape.device):
                layer.fp8_method = TorchLinearMethod()
        layer.fp8_method.create(layer, shape)
        if layer.is_rounded:
            layer.borrows = frozenset()  # rounded values are written to the weight

    def pack(self, layer: nn.Module) -> None:
        """Round the weight, and store its codes or its rounded values.

        Raises ConfigError if `ignored_layers` has a name that no layer has.
        """
        self._start(layer)
        if not layer.is_rounded:
            layer.fp8_method.pack(layer)
        elif is_host_memory(layer.weight.device):
            self._write_values(layer)
            layer.fp8_method.pack(layer)
        else:
            rounded = list(self._rounded_parts(layer))
            codes_OI = torch.cat([codes.view(torch.uint8) for codes, _ in rounded])
            scales_OQ = torch.cat([scales for _, scales in rounded])
            del layer.weight
            _register(layer, "weight", codes_OI.view(torch.float8_e4m3fn))
            _register(layer, "weight_scale", scales_OQ)

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, a new tensor [T, O]."""
        if not _has_codes(layer):
            product_TO: torch.Tensor = layer.fp8_method.apply(layer, x_TI)
            return product_TO
        return functional.linear(x_TI, self._values(layer), layer.bias)

    def apply_experts(
        self,
        layers: ExpertLayers,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, a new tensor [T, D]."""
        gate_up, down = layers.gate_up, layers.down
        methods = {type(layer.fp8_method): layer.fp8_method for layer in (gate_up, down)}
        if len(methods) == 1 and not _has_codes(gate_up) and not _has_codes(down):
            (method,) = methods.values()
            y_TD: torch.Tensor = method.apply_experts(layers, x_TD, experts_TK, weights_TK)
            return y_TD
        num_experts = gate_up.fp8_shape.num_experts

        def split(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.unflatten(0, (num_experts, -1))

        weights = ExpertWeights(
            gate_up_EGD=self._values(gate_up).unflatten(0, (num_experts, -1)),
            down_EDI=self._values(down).unflatten(0, (num_experts, -1)),
            gate_up_bias_EG=split(gate_up.bias),
            down_bias_ED=split(down.bias),
            limit=layers.limit,
            alpha=layers.alpha,
        )
        return layers.ops.fused_experts(x_TD, experts_TK, weights_TK, weights)

    def _values(self, layer: nn.Module) -> torch.Tensor:
        if not _has_codes(layer):
            weight_OI: torch.Tensor = layer.weight
            return weight_OI
        return decode(layer.weight, layer.weight_scale, self._block, layer.fp8_shape.dtype)

    def _start(self, layer: nn.Module) -> None:
        """Check `ignored_layers` before the first layer is packed: all layers exist then."""
        if self._has_started:
            return
        self._has_started = True
        if self._unmatched:
            raise ConfigError(
                f"ignored_layers of the linear method 'fp8': {shorten(next(iter(self._unmatched)))}"
                " names no linear layer of the model. Write whole parts of a layer's name, such as "
                f"{layer.fp8_shape.name!r}."
            )
        if is_host_memory(layer.fp8_shape.device):
            logger.info(
                "quantization='fp8': the weights are rounded to float8_e4m3fn and stored as %s, "
                "because no kernel of this device reads such codes. They need as much memory as "
                "without quantization; quantization='int8' needs half of it.",
                str(layer.fp8_shape.dtype).removeprefix("torch."),
            )

    def _is_rounded(self, layer: nn.Module, shape: LinearShape) -> bool:
        parent, dot, _ = shape.name.rpartition(".")
        names = [f"{parent}{dot}{part}" for part in shape.part_names]
        ignored = [name for name in names if self._is_ignored(name) or self._is_ignored(shape.name)]
        if isinstance(layer, ParallelLMHead) and self._options.head == "unquantized":
            return False
        if ignored and len(ignored) < len(names):
            other = next(name for name in names if name not in ignored)
            raise ConfigError(
                f"ignored_layers of the linear method 'fp8' names {ignored[0]} but not {other}: "
                f"name all parts of {shape.name}, or none of them"
            )
        return not ignored

    def _is_ignored(self, name: str) -> bool:
        if not self._options.ignored_layers:
            return False
        sequences = set(_part_sequences(name))
        matching = [entry for entry in self._options.ignored_layers if entry in sequences]
        for entry in matching:
            self._unmatched.pop(entry, None)
        return bool(matching)

    def _check_blocks(self, layer: nn.Module, shape: LinearShape) -> None:
        shards: Iterable[Shard] = (
            *getattr(layer, "part_shards", ()),
            *([layer.in_shard] if hasattr(layer, "in_shard") else []),
        )
        for shard in shards:
            is_cut = shard.start % self._block or _end(shard) % self._block if self._block else 0
            if is_cut and not shard.is_whole:
                raise ConfigError(
                    f"The linear method 'fp8' with scales='block' cannot shard {shape.name} over "
                    f"the ranks: a rank has the features {shard.start} to {_end(shard)} of "
                    f"{shard.whole}, which cut a block of {self._block}. Set scales='channel', a "
                    "smaller block_size, or another tensor_parallel_size"
                )

    def _write_values(self, layer: nn.Module) -> None:
        """Write the rounded values to the weight; to a copy, if an embedding uses it too."""
        if isinstance(layer, ParallelLMHead):
            _register(layer, "weight", layer.weight.detach().clone())
        parts = layer.weight.detach().split(layer.fp8_shape.part_sizes)
        for part_OI, (codes, scales) in zip(parts, self._rounded_parts(layer), strict=True):
            decode_to(part_OI, codes, scales, self._block)

    def _rounded_parts(self, layer: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield codes and scales of each part of the layer."""
        in_shard: Shard | None = getattr(layer, "in_shard", None)
        ranks: RankGroup | None = None
        if not self._block and in_shard is not None and not in_shard.is_whole:
            ranks = layer.ranks  # type: ignore[assignment]
        for part_OI in layer.weight.detach().split(layer.fp8_shape.part_sizes):
            yield round_weight(part_OI, self._block, ranks)


def _has_codes(layer: nn.Module) -> bool:
    return "weight_scale" in layer._parameters


def _register(layer: nn.Module, name: str, values: torch.Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(values, requires_grad=False))


def _end(shard: Shard) -> int:
    """Return the end of a shard; 0 at the end of the dimension, where a block may be incomplete."""
    end = shard.start + shard.size
    return 0 if end == shard.whole else end


def _part_sequences(name: str) -> Iterator[str]:
    """Yield all sequences of consecutive parts of a name, such as "mlp.down_proj"."""
    parts = name.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])
