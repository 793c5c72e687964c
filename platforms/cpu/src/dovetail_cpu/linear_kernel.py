"""The packed weights of one layer: their memory, and the native call that computes with them.

This module does not depend on layers, models or the packing format. Dimensions: T tokens, I input
features, O output features; for experts: D hidden size, K experts per token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dovetail_cpu.native_memory import NativeMemory
from dovetail_cpu_kernels.experts import ExpertsArgs
from dovetail_cpu_kernels.linear import OUT_F32, PackedLinear, new_args, operation
from dovetail_cpu_kernels.linear import pack as pack_linear
from dovetail_cpu_kernels.ops import op
from dovetail_torch.layers.expert_groups import activate, group_tokens

ALIGNMENT_BYTES = 4096
"""Alignment of packed weights: one page, as in cached files."""
PANEL_FEATURES = 32
"""Number of output features in a panel. Panels are contiguous and independent."""


class Arena:
    """Allocates the packed weights of many layers from one block of memory, to get huge pages."""

    def __init__(self) -> None:
        self._reserved = 0
        self._used = 0
        self._pieces: list[NativeMemory] = []
        self._early: NativeMemory | None = None

    def use(self, memory: NativeMemory) -> None:
        """Use `memory`, which is zeroed, if it is large enough for all announced weights."""
        self._early = memory

    def reserve(self, num_bytes: int) -> None:
        """Announce that `num_bytes` will be allocated."""
        self._reserved += _aligned(num_bytes)

    def take(self, num_bytes: int) -> memoryview:
        """Return zeroed memory that is freed with the view. Raise CapacityError if that fails."""
        size = _aligned(num_bytes)
        if not self._pieces or self._used + size > self._pieces[-1].num_bytes:
            self._pieces = [self._allocate(max(size, self._reserved))]
            self._used = 0
        view = _view(self._pieces[-1], self._used, num_bytes)
        self._used += size
        self._reserved = max(0, self._reserved - size)
        return view

    def _allocate(self, num_bytes: int) -> NativeMemory:
        early, self._early = self._early, None
        if early is not None and early.num_bytes >= num_bytes:
            early.forget(num_bytes)
            return early
        del early  # frees the memory
        return NativeMemory(num_bytes)


class LinearKernel:
    """Multiplies by one layer's packed weights.

    specs: descriptions of the packed weights that are stacked along O, in the order of `form`.
    form: the packed weights as bytes; kept alive. bias_O: bfloat16, kept alive, or None. limit,
    alpha: parameters of the activation of a weight with gate and up projections
    (`dovetail.interfaces.ops.ExpertWeights`). dtype: of the outputs, bfloat16 or float32.
    """

    def __init__(
        self,
        specs: Sequence[PackedLinear],
        form: memoryview,
        bias_O: torch.Tensor | None,
        *,
        limit: float = 0.0,
        alpha: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.form = form
        self._bias_O = bias_O
        self._dtype = dtype
        self._in_features = specs[0].K
        self._out_features = sum(spec.num_outputs for spec in specs)
        self._calls = []
        address, column = address_of(form), 0
        output_flag = OUT_F32 if dtype == torch.float32 else 0
        for spec in specs:
            args = new_args(spec, address)
            args.flags |= output_flag
            args.ldy = self._out_features
            args.limit, args.alpha = limit, alpha
            if bias_O is not None:
                args.bias = bias_O[column:].data_ptr()
            offset = column * dtype.itemsize
            self._calls.append((operation(spec.kind), args, offset, args.flags))
            address += spec.num_bytes
            column += spec.num_outputs

    def __call__(self, x_TI: torch.Tensor, activation_flag: int = 0) -> torch.Tensor:
        """Return activation(x · Wᵀ + b), a new tensor [T, O]. x is bfloat16; rows may be strided.

        activation_flag: a value of `ACTIVATION_FLAGS`; 0 for no activation. Raises ValueError for
        another dtype or number of features.
        """
        x_TI = _checked_rows(x_TI, self._in_features)
        num_tokens = x_TI.shape[0]
        y_TO = torch.empty((num_tokens, self._out_features), dtype=self._dtype)
        x, y, ldx = x_TI.data_ptr(), y_TO.data_ptr(), x_TI.stride(0)
        for call, args, offset, flags in self._calls:
            args.x = x
            args.y = y + offset
            args.M = num_tokens
            args.ldx = ldx
            args.flags = flags | activation_flag
            call(ctypes.addressof(args))
        return y_TO


class PackedExperts:
    """One of the two stacked linear layers of all experts.

    specs: the packed weights of each expert, in the order of `form`. form: the packed weights as
    bytes; kept alive. bias_EO: bfloat16, or None; kept alive.
    """

    def __init__(
        self,
        specs: Sequence[Sequence[PackedLinear]],
        form: memoryview,
        bias_EO: torch.Tensor | None,
    ) -> None:
        self.specs, self.form, self.bias_EO = specs, form, bias_EO

    @property
    def spec(self) -> PackedLinear | None:
        """The packed weight of each expert, or None if the quantization types differ."""
        first = self.specs[0]
        is_equal = len(first) == 1 and all(specs == first for specs in self.specs)
        return first[0] if is_equal else None

    def separate(self, limit: float, alpha: float) -> list[LinearKernel]:
        """Return a kernel for each expert. limit, alpha: see `LinearKernel`."""
        kernels, start = [], 0
        for expert, specs in enumerate(self.specs):
            end = start + sum(spec.num_bytes for spec in specs)
            bias_O = None if self.bias_EO is None else self.bias_EO[expert]
            form = self.form[start:end]
            kernels.append(LinearKernel(specs, form, bias_O, limit=limit, alpha=alpha))
            start = end
        return kernels


class ExpertKernel:
    """Computes the experts of a layer. Its argument struct is reused for each call.

    gate_up: a layer with `PackedLinear.gate_up`. limit, alpha: see `LinearKernel`.
    """

    def __init__(
        self,
        gate_up: PackedExperts,
        down: PackedExperts,
        specs: tuple[PackedLinear, PackedLinear],
        *,
        limit: float,
        alpha: float,
    ) -> None:
        self._layers, (first, second) = (gate_up, down), specs
        self._call = op("experts")
        self._args = ExpertsArgs(
            gate_up=address_of(gate_up.form),
            gate_up_bias=pointer_to(gate_up.bias_EO),
            down=address_of(down.form),
            down_bias=pointer_to(down.bias_EO),
            num_experts=len(gate_up.specs),
            size=first.K,
            inner=second.K,
            y_stride=first.K,
            gate_up_kind=first.kind,
            gate_up_group=first.group,
            down_kind=second.kind,
            down_group=second.group,
            limit=limit,
            alpha=alpha,
        )

    def __call__(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, a new tensor [T, D].

        x is bfloat16; its rows may be strided. experts: int64, each an index; weights: float32;
        both contiguous, as routers return them. Raises ValueError for other dtypes, sizes and
        layouts.
        """
        x_TD = _checked_rows(x_TD, self._args.size)
        is_served = experts_TK.dtype == torch.int64 and weights_TK.dtype == torch.float32
        is_served = is_served and experts_TK.is_contiguous() and weights_TK.is_contiguous()
        shape_TK = (len(x_TD), experts_TK.shape[-1])
        if not (is_served and experts_TK.shape == weights_TK.shape == shape_TK):
            raise ValueError(
                f"the experts and weights of {len(x_TD)} tokens must be contiguous matrices of "
                f"int64 and float32, not {_kind(experts_TK)} and {_kind(weights_TK)}"
            )
        y_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16)
        args = self._args
        args.x, args.y, args.x_stride = x_TD.data_ptr(), y_TD.data_ptr(), x_TD.stride(0)
        args.experts, args.weights = experts_TK.data_ptr(), weights_TK.data_ptr()
        args.num_tokens, args.top_k = experts_TK.shape
        self._call(ctypes.addressof(args))
        return y_TD


class SeparateExpertKernels:
    """Runs the experts of a layer sequentially.

    Used if their weights have different quantization types.
    """

    def __init__(
        self, gate_up: PackedExperts, down: PackedExperts, *, limit: float, alpha: float
    ) -> None:
        self._gate_up, self._down = gate_up.separate(limit, alpha), down.separate(0.0, 0.0)
        # If gate and up have the same kind, they are packed for the fused activation.
        self._is_active = [len(specs) == 1 and specs[0].gate_up for specs in gate_up.specs]
        self._limit, self._alpha = limit, alpha

    def __call__(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, a new tensor [T, D]."""
        groups = group_tokens(x_TD, experts_TK, weights_TK, len(self._down))
        for expert, rows_ND in groups:
            inner_NI = self._gate_up[expert](rows_ND)
            if not self._is_active[expert]:
                inner_NI = activate(inner_NI, self._limit, self._alpha)
            groups.put(expert, self._down[expert](inner_NI))
        return groups.total()


def make_expert_kernel(
    gate_up: PackedExperts, down: PackedExperts, *, limit: float, alpha: float
) -> ExpertKernel | SeparateExpertKernels:
    """Return the kernel of a layer's experts."""
    first, second = gate_up.spec, down.spec
    if first is None or second is None or not first.gate_up:
        return SeparateExpertKernels(gate_up, down, limit=limit, alpha=alpha)
    return ExpertKernel(gate_up, down, (first, second), limit=limit, alpha=alpha)


def pack(spec: PackedLinear, parts_OI: Sequence[torch.Tensor], form: memoryview) -> int:
    """Fill `form` from bfloat16 weights [O, I] or rows of quantized blocks, stacked along O.

    All parts except the last have a multiple of PANEL_FEATURES output features. Returns the number
    of NaN and infinite values; if it is not 0, do not use `form`.
    """
    num_nonfinite = 0
    address = address_of(form)
    for part_OI in parts_OI:
        rows_OI = part_OI if part_OI.stride(1) == 1 else part_OI.contiguous()
        part = replace(spec, N=len(rows_OI))
        num_nonfinite += pack_linear(part, rows_OI.data_ptr(), address, ld=rows_OI.stride(0))
        address += part.num_bytes
    return num_nonfinite


def _checked_rows(x_TI: torch.Tensor, num_features: int) -> torch.Tensor:
    """Return x with contiguous rows. Raise ValueError if the kernels do not support it."""
    if x_TI.dtype != torch.bfloat16 or x_TI.dim() != 2 or x_TI.shape[1] != num_features:
        raise ValueError(
            f"packed weights need bfloat16 inputs of shape [tokens, {num_features}], not "
            f"{_kind(x_TI)}"
        )
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def pointer_to(values: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's values, or None."""
    return None if values is None else values.data_ptr()


def address_of(form: memoryview) -> int:
    """Return the address of the buffer's bytes."""
    return int(np.frombuffer(form, np.uint8).ctypes.data)


def _view(memory: NativeMemory, offset: int, num_bytes: int) -> memoryview:
    block = (ctypes.c_uint8 * num_bytes).from_address(memory.address + offset)
    # The array does not own the memory. Its reference keeps the owner alive while a view exists.
    block.owner = memory
    return memoryview(block).cast("B")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
