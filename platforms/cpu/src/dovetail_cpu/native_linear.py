"""The linear method `native`: bfloat16 weights packed for the native kernels.

Weights are packed after loading, layer by layer, by the thread team; the plain weights are then
freed. For other dtypes the method falls back to its base class. It is the base class of the
quantized methods, which pack the same weights into fewer bits.
Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces import LinearShape
from dovetail_cpu.linear_kernel import PANEL_FEATURES, Arena, LinearKernel, pack
from dovetail_cpu.mapped_pages import forget_pages
from dovetail_cpu.onednn_linear import OneDNNLinearMethod
from dovetail_cpu.packed_cache import PACKED_FORM
from dovetail_cpu_kernels.library import ABI_VERSION
from dovetail_cpu_kernels.linear import BF16, PackedLinear


class NativeLinearMethod(OneDNNLinearMethod):
    """Parameters as in the checkpoint. After `pack` only the packed weight is left.

    A head tied to an embedding is packed too. The embedding keeps its table, of which only a few
    rows are read, so a mapped table needs almost no memory.
    """

    provides: ClassVar[frozenset[str]] = frozenset({PACKED_FORM})
    batch_invariant: ClassVar[frozenset[str]] = frozenset({"bfloat16"})

    def __init__(self) -> None:
        self._arena = Arena()

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register `weight` and `bias` as in the checkpoint."""
        super().create(layer, shape)
        layer.kernel = None
        layer.packed_shape, layer.packed_spec = shape, self._spec(layer, shape)
        if layer.packed_spec is not None:
            layer.borrows = frozenset({"weight"})
            self._arena.reserve(layer.packed_spec.num_bytes)

    def pack(self, layer: nn.Module) -> None:
        """Pack the weight and free the plain one; raise WeightError for NaN and infinities."""
        spec = layer.packed_spec
        if spec is None:
            super().pack(layer)
            return
        if layer.kernel is None:
            form = self._arena.take(spec.num_bytes)
            self._fill(layer, form)
            layer.kernel = LinearKernel(spec, form.toreadonly(), layer.bias)
        del layer.weight

    def _fill(self, layer: nn.Module, form: memoryview) -> None:
        """Pack the layer's parts one after the other, each from where the loader stored it."""
        spec, shape = layer.packed_spec, layer.packed_shape
        borrowed: dict[int, torch.Tensor] = getattr(layer, "borrowed", {})
        own = layer.weight.detach().split(shape.part_sizes)
        parts_OI = [borrowed.get(number, rows) for number, rows in enumerate(own)]
        shares_panels = any(len(part_OI) % PANEL_FEATURES for part_OI in parts_OI[:-1])
        num_nonfinite = pack(spec, [torch.cat(parts_OI)] if shares_panels else parts_OI, form)
        if num_nonfinite:
            raise WeightError(
                f"{num_nonfinite} values of {_not_finite(shape, parts_OI)} are NaN or infinite: "
                "the checkpoint is damaged; download it again"
            )
        for mapped in borrowed.values():
            forget_pages(mapped)
        borrowed.clear()

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, contiguous."""
        kernel = layer.kernel
        if kernel is None:
            return super().apply(layer, x_TI)
        product_TO: torch.Tensor = kernel(x_TI)
        return product_TO

    def packed_format(self) -> str:
        """Return the name of the format and the library's version."""
        return f"{type(self).__name__}/{ABI_VERSION}"

    def packed_bytes(self, layer: nn.Module) -> int:
        """Return the size of the layer's packed weights; 0 if it is not packed natively."""
        return 0 if layer.packed_spec is None else layer.packed_spec.num_bytes

    def packed_form(self, layer: nn.Module) -> memoryview:
        """Return the packed weights, after `pack`."""
        form: memoryview = layer.kernel.form
        return form

    def restore(self, layer: nn.Module, form: memoryview) -> None:
        """Use the packed weights in `form`, and mark the plain weights as loaded."""
        layer.kernel = LinearKernel(layer.packed_spec, form, layer.bias)
        layer.settled = frozenset({"weight"})

    def _spec(self, layer: nn.Module, shape: LinearShape) -> PackedLinear | None:
        """Return how the layer's weights are packed; None for a dtype without kernels."""
        if shape.dtype != torch.bfloat16:
            return None
        return PackedLinear(kind=BF16, N=shape.out_features, K=shape.in_features)


def _not_finite(shape: LinearShape, parts_OI: Sequence[torch.Tensor]) -> str:
    """Return the checkpoint's names of the parts that contain NaN or infinities."""
    parent, dot, _ = shape.name.rpartition(".")
    return ", ".join(
        f"{parent}{dot}{name}.weight"
        for name, part_OI in zip(shape.part_names, parts_OI, strict=True)
        if not bool(part_OI.isfinite().all())
    )
