"""The `native` linear method: bfloat16 weights packed for the native kernels.

Weights are packed after loading, layer by layer, by the thread pool; the unpacked weights are then
freed. For other dtypes the method falls back to its base class. It is the base class of the
quantized methods, which pack the same weights into fewer bits. The experts of a layer are packed
one by one, and one native call computes all of them.
Dimensions: T tokens, I input features, O output features; for experts: D hidden size, K experts
per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces import LinearShape
from dovetail.interfaces.linear_method import ACTIVATION, EXPERTS, ExpertLayers
from dovetail_cpu.linear_kernel import (
    PANEL_FEATURES,
    Arena,
    LinearKernel,
    PackedExperts,
    make_expert_kernel,
    pack,
)
from dovetail_cpu.mapped_pages import forget_pages
from dovetail_cpu.native_memory import NativeMemory
from dovetail_cpu.onednn_linear import OneDNNLinearMethod
from dovetail_cpu.packed_cache.packed_form import PACKED_FORM
from dovetail_cpu_kernels.library import PACK_VERSION
from dovetail_cpu_kernels.linear import ACTIVATION_FLAGS, BF16, KIND_NAMES, PackedLinear
from dovetail_torch.layers.embedding import ParallelLMHead


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive parts of a layer that are packed as one weight. `parts` are their indices."""

    spec: PackedLinear
    parts: range


class NativeLinearMethod(OneDNNLinearMethod):
    """Parameters have the checkpoint's layout until `pack`; then only the packed weight exists.

    An LM head that is tied to an embedding is packed too. The embedding keeps its table. A step
    reads only a few rows of the table, so a mapped table needs almost no memory.
    """

    provides: ClassVar[frozenset[str]] = frozenset({PACKED_FORM, EXPERTS, ACTIVATION})
    batch_invariant: ClassVar[frozenset[str]] = frozenset({"bfloat16"})

    def __init__(self) -> None:
        self._arena = Arena()
        self._unpacked: WeakSet[nn.Module] = WeakSet()

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register `weight` and `bias` as in the checkpoint."""
        super().create(layer, shape)
        layer.kernel = None
        layer.packed_shape, layer.packed_spec = shape, self._packed_spec(layer, shape)
        if layer.packed_spec is not None:
            layer.borrows = frozenset({"weight"})
            self._unpacked.add(layer)

    def pack(self, layer: nn.Module) -> None:
        """Pack the weight and free the unpacked weight.

        Raises WeightError if a value is NaN or infinite.
        """
        if layer.packed_spec is None:
            super().pack(layer)
            return
        if layer.kernel is None:
            self._reserve()
            form = self._arena.take(self.packed_bytes(layer))
            self._fill(layer, form)
            self._use(layer, form.toreadonly())
        del layer.weight

    def use_memory(self, memory: NativeMemory) -> None:
        """Pack the weights into `memory`, which is zeroed, if it is large enough for all layers."""
        self._arena.use(memory)

    def _reserve(self) -> None:
        """Reserve space in the arena for all layers that are not packed yet."""
        for layer in self._unpacked:
            if layer.kernel is None:
                self._arena.reserve(self.packed_bytes(layer))
        self._unpacked.clear()

    def _use(self, layer: nn.Module, form: memoryview) -> None:
        runs, num_experts = self._runs(layer), layer.packed_shape.num_experts
        if num_experts == 1:
            # Logits are not rounded to bfloat16: samplers compute in float32.
            dtype = torch.float32 if isinstance(layer, ParallelLMHead) else torch.bfloat16
            packed = [run.spec for run in runs]
            layer.kernel = LinearKernel(packed, form, layer.bias, dtype=dtype)
            return
        num_parts = len(layer.packed_shape.part_names) // num_experts
        specs: list[list[PackedLinear]] = [[] for _ in range(num_experts)]
        for run in runs:
            specs[run.parts.start // num_parts].append(run.spec)
        bias_EO = None if layer.bias is None else layer.bias.unflatten(0, (num_experts, -1))
        layer.kernel = PackedExperts(specs, form, bias_EO)

    def _fill(self, layer: nn.Module, form: memoryview) -> None:
        """Pack the parts of the layer in order, and check that their values are finite."""
        weights = self._weights(layer)
        start = 0
        for run in self._runs(layer):
            parts = [weights[number] for number in run.parts]
            shares_panels = any(len(part) % PANEL_FEATURES for part in parts[:-1])
            is_one = shares_panels or run.spec.gate_up
            whole = [torch.cat(parts)] if is_one else parts
            num_nonfinite = pack(run.spec, whole, form[start : start + run.spec.num_bytes])
            if num_nonfinite:
                numbers = "scales" if run.spec.is_blocks else "values"
                problem = "are NaN or infinite: the checkpoint is damaged; download it again"
                if run.spec.rounds:
                    problem = (
                        f"are NaN or infinite, or too large for {KIND_NAMES[run.spec.kind]}: "
                        "choose another format, or download the checkpoint again if it is damaged"
                    )
                raise WeightError(
                    f"{num_nonfinite} {numbers} of {_not_finite(run, weights, layer.packed_shape)} "
                    f"{problem}"
                )
            start += run.spec.num_bytes
        self._release(layer)

    def _weights(self, layer: nn.Module) -> list[torch.Tensor]:
        """Return the weight matrix of each part of the layer, in order."""
        borrowed: dict[int, torch.Tensor] = getattr(layer, "borrowed", {})
        own = layer.weight.detach().split(layer.packed_shape.part_sizes)
        return [borrowed.get(number, rows_OI) for number, rows_OI in enumerate(own)]

    def _release(self, layer: nn.Module) -> None:
        """Release memory that was borrowed from the loader, after packing."""
        borrowed: dict[int, torch.Tensor] = getattr(layer, "borrowed", {})
        for mapped in borrowed.values():
            forget_pages(mapped)
        borrowed.clear()

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, contiguous; the logits of an LM head in float32."""
        kernel = layer.kernel
        if kernel is None:
            return super().apply(layer, x_TI)
        product_TO: torch.Tensor = kernel(x_TI)
        return product_TO

    def apply_activation(
        self, layer: nn.Module, x_TI: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """Return activation(x · Wᵀ + b), contiguous."""
        kernel = layer.kernel
        if kernel is None:
            return super().apply_activation(layer, x_TI, activation)
        result_TO: torch.Tensor = kernel(x_TI, ACTIVATION_FLAGS[activation])
        return result_TO

    def apply_experts(
        self,
        layers: ExpertLayers,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, a new tensor [T, D]."""
        gate_up, down = layers.gate_up, layers.down
        if gate_up.kernel is None:
            return super().apply_experts(layers, x_TD, experts_TK, weights_TK)
        kernel = down.__dict__.get("expert_kernel")
        if kernel is None:
            kernel = down.expert_kernel = make_expert_kernel(
                gate_up.kernel, down.kernel, limit=layers.limit, alpha=layers.alpha
            )
        y_TD: torch.Tensor = kernel(x_TD, experts_TK, weights_TK)
        return y_TD

    def packed_format(self) -> str:
        """Return the name of the format and the version of its bytes."""
        return f"{type(self).__name__}/{PACK_VERSION}"

    def packed_bytes(self, layer: nn.Module) -> int:
        """Return the size of the layer's packed weights, or 0 if it is not packed natively."""
        if layer.packed_spec is None:
            return 0
        return sum(run.spec.num_bytes for run in self._runs(layer))

    def packed_form(self, layer: nn.Module) -> memoryview:
        """Return the packed weights, after `pack`."""
        form: memoryview = layer.kernel.form
        return form

    def restore(self, layer: nn.Module, form: memoryview) -> None:
        """Use the packed weights in `form`, and mark the layer's weights as loaded."""
        self._use(layer, form)
        layer.settled = frozenset({"weight"})

    def _runs(self, layer: nn.Module) -> list[Run]:
        """Return the groups of parts that are packed as one weight, in order."""
        shape: LinearShape = layer.packed_shape
        count = len(shape.part_names) // shape.num_experts
        starts = range(0, len(shape.part_names), count)
        return [Run(spec=layer.packed_spec, parts=range(first, first + count)) for first in starts]

    def _packed_spec(self, layer: nn.Module, shape: LinearShape) -> PackedLinear | None:
        """Return how the weight of a layer or expert is packed, or None if it is not packed."""
        spec = self._spec(layer, shape)
        if spec is None or shape.num_experts == 1:
            return spec
        gate_up = len(shape.part_names) == 2 * shape.num_experts
        # Experts have no refined groups.
        return replace(spec, N=spec.N // shape.num_experts, gate_up=gate_up, refine=0)

    def _spec(self, layer: nn.Module, shape: LinearShape) -> PackedLinear | None:
        """Return how the layer's weight is packed, or None for a dtype without kernels."""
        if shape.dtype != torch.bfloat16:
            return None
        return PackedLinear(kind=BF16, N=shape.out_features, K=shape.in_features)


def _not_finite(run: Run, weights: Sequence[torch.Tensor], shape: LinearShape) -> str:
    """Return the checkpoint's names of the parts that contain NaN or infinities."""
    parent, dot, _ = shape.name.rpartition(".")
    names = []
    for number in run.parts:
        alone = replace(run.spec, N=shape.part_sizes[number], gate_up=False)
        if pack(alone, [weights[number]], Arena().take(alone.num_bytes)):
            names.append(f"{parent}{dot}{shape.part_names[number]}.weight")
    return ", ".join(names)
