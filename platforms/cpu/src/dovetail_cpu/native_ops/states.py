"""The recurrent operations in native kernels, for the op provider `native`.

A request's results are bitwise equal in every batch. Cases that the kernels do not support use
torch. Dimensions: T tokens, N parts, B blocks, C channels, W kernel size, H heads, G groups of
heads, K and V features of a key and of a value, I features of a group of a norm.
"""

from __future__ import annotations

import ctypes

import torch

from dovetail.interfaces.ops import (
    GatedRecurrenceInputs,
    LinearAttentionInputs,
    Ops,
    StateParts,
    StatePartsMemory,
)
from dovetail_cpu.linear_kernel import pointer_to
from dovetail_cpu_kernels.ops import OPS, op
from dovetail_cpu_kernels.states import MAX_CONV_WIDTH
from dovetail_cpu_kernels.states import StateParts as NativeParts
from dovetail_torch.layers.torch_ops import TorchOps

_TORCH = TorchOps()
_DTYPES = (torch.bfloat16, torch.float32)


class NativeStates(Ops):
    """Gated norms of bfloat16 values; other operations of bfloat16 or float32 values."""

    def __init__(self) -> None:
        self._conv, self._call_conv = OPS["causal_conv"](), op("causal_conv")
        self._attention, self._call_attention = OPS["linear_attention"](), op("linear_attention")
        self._recurrence, self._call_recurrence = OPS["gated_recurrence"](), op("gated_recurrence")
        self._gated_norm, self._call_gated_norm = OPS["gated_norm"](), op("gated_norm")
        self._parts: dict[int, tuple[StatePartsMemory, NativeParts]] = {}

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return silu(convolution + bias), a new tensor, and update the states."""
        return self._convolve(x_TC, weight_CW, bias_C, states_BWC, parts, is_plain=False)

    def plain_causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return convolution + bias, a new tensor, and update the states."""
        return self._convolve(x_TC, weight_CW, bias_C, states_BWC, parts, is_plain=True)

    def _convolve(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
        *,
        is_plain: bool,
    ) -> torch.Tensor:
        is_served = _supports_convolution(x_TC, weight_CW, bias_C, states_BWC)
        if not (is_served and _supports_parts(parts, len(x_TC))):
            in_torch = _TORCH.plain_causal_conv if is_plain else _TORCH.causal_conv
            return in_torch(x_TC, weight_CW, bias_C, states_BWC, parts)
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
        native, _kept = self._native_parts(parts)
        args = self._conv
        args.parts = ctypes.addressof(native)
        args.x, args.weight, args.bias = x_TC.data_ptr(), weight_CW.data_ptr(), pointer_to(bias_C)
        args.states, args.y = states_BWC.data_ptr(), y_TC.data_ptr()
        args.channels, args.width = weight_CW.shape
        args.x_stride, args.weight_stride = x_TC.stride(0), weight_CW.stride(0)
        args.block_stride, args.y_stride = states_BWC.stride(0), y_TC.stride(0)
        args.is_plain, args.is_float32 = is_plain, x_TC.dtype == torch.float32
        self._call_conv(ctypes.addressof(args))
        return y_TC

    def linear_attention(
        self, inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the outputs of linear attention, a new tensor, and update the states."""
        is_served = _supports_attention(inputs, states_BHKV)
        if not (is_served and _supports_parts(parts, len(inputs.v_THV))):
            return _TORCH.linear_attention(inputs, states_BHKV, parts)
        q_TGK, k_TGK, v_THV, steps_TH = inputs.q_TGK, inputs.k_TGK, inputs.v_THV, inputs.steps_TH
        beta_TH = inputs.beta_TH
        y_THV = torch.empty(v_THV.shape, dtype=torch.float32)
        native, _kept = self._native_parts(parts)
        args = self._attention
        args.parts = ctypes.addressof(native)
        args.q, args.k, args.v = q_TGK.data_ptr(), k_TGK.data_ptr(), v_THV.data_ptr()
        args.steps, args.betas = steps_TH.data_ptr(), pointer_to(beta_TH)
        args.step_bias, args.rates = inputs.step_bias_H.data_ptr(), inputs.rates_H.data_ptr()
        args.skip, args.key_eps = pointer_to(inputs.skip_H), inputs.key_eps
        args.min_step, args.max_step = inputs.step_limits
        args.states, args.y = states_BHKV.data_ptr(), y_THV.data_ptr()
        _, args.num_heads, args.value_size = v_THV.shape
        _, args.num_groups, args.key_size = q_TGK.shape
        args.q_stride, args.k_stride, args.v_stride = (x.stride(0) for x in (q_TGK, k_TGK, v_THV))
        args.steps_stride = steps_TH.stride(0)
        args.betas_stride = 0 if beta_TH is None else beta_TH.stride(0)
        args.block_stride = states_BHKV.stride(0)
        args.is_float32 = v_THV.dtype == torch.float32
        self._call_attention(ctypes.addressof(args))
        return y_THV

    def gated_recurrence(
        self, inputs: GatedRecurrenceInputs, states_BC: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the states after each token, a new tensor, and update the states."""
        is_served = _supports_recurrence(inputs, states_BC)
        if not (is_served and _supports_parts(parts, len(inputs.x_TC))):
            return _TORCH.gated_recurrence(inputs, states_BC, parts)
        x_TC, input_TC, decay_TC = inputs.x_TC, inputs.input_gates_TC, inputs.decay_gates_TC
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
        native, _kept = self._native_parts(parts)
        args = self._recurrence
        args.parts = ctypes.addressof(native)
        args.x, args.y, args.states = x_TC.data_ptr(), y_TC.data_ptr(), states_BC.data_ptr()
        args.input_gates, args.decay_gates = input_TC.data_ptr(), decay_TC.data_ptr()
        args.input_bias, args.decay_bias = (
            bias_C.data_ptr() for bias_C in (inputs.input_bias_C, inputs.decay_bias_C)
        )
        args.rates, args.channels = inputs.rates_C.data_ptr(), x_TC.shape[1]
        args.x_stride, args.y_stride = x_TC.stride(0), y_TC.stride(0)
        args.input_gates_stride, args.decay_gates_stride = input_TC.stride(0), decay_TC.stride(0)
        args.block_stride, args.is_float32 = states_BC.stride(0), x_TC.dtype == torch.float32
        self._call_recurrence(ctypes.addressof(args))
        return y_TC

    def gated_rms_norm(
        self,
        x_TGI: torch.Tensor,
        gate_TGI: torch.Tensor,
        weight_GI: torch.Tensor,
        eps: float,
        *,
        norm_first: bool,
    ) -> torch.Tensor:
        """Return the gated RMS norm of x, a new tensor. `x_TGI` is overwritten."""
        if not _supports_norm(x_TGI, gate_TGI, weight_GI):
            return _TORCH.gated_rms_norm(x_TGI, gate_TGI, weight_GI, eps, norm_first=norm_first)
        y_TGI = torch.empty(x_TGI.shape, dtype=torch.bfloat16)
        args = self._gated_norm
        args.x, args.gate, args.y = x_TGI.data_ptr(), gate_TGI.data_ptr(), y_TGI.data_ptr()
        args.weight, args.gate_stride = weight_GI.data_ptr(), gate_TGI.stride(0)
        args.num_tokens, args.num_groups, args.size = x_TGI.shape
        args.weight_stride = args.size if weight_GI.dim() == 2 else 0
        args.norm_first, args.eps = norm_first, eps
        self._call_gated_norm(ctypes.addressof(args))
        return y_TGI

    def _native_parts(self, parts: StateParts) -> tuple[NativeParts, object]:
        """Return the struct of the parts, and what must be kept until the call returns.

        The struct of parts in memory that stays the same is kept for recorded steps.
        """
        memory = parts.memory
        if memory is not None:
            if id(memory) not in self._parts:
                self._parts[id(memory)] = (memory, _struct_of(memory))
            return self._parts[id(memory)][1], None
        own = StatePartsMemory(
            num_requests_1=torch.tensor([len(parts.num_parts)]),
            num_parts_R=torch.tensor(parts.num_parts),
            sizes_N=torch.tensor(parts.sizes),
            # A copy, which a recorded step must not contain: this memory is freed after the call.
            reads_N=parts.reads_N.clone(memory_format=torch.contiguous_format),
            writes_N=parts.writes_N.contiguous(),
        )
        return _struct_of(own), own


def _struct_of(memory: StatePartsMemory) -> NativeParts:
    return NativeParts(
        sizes=memory.sizes_N.data_ptr(),
        num_parts=memory.num_parts_R.data_ptr(),
        reads=memory.reads_N.data_ptr(),
        writes=memory.writes_N.data_ptr(),
        num_requests=memory.num_requests_1.data_ptr(),
    )


def _supports_parts(parts: StateParts, num_tokens: int) -> bool:
    """Return whether the parts are within the tokens and the blocks have the kernel's dtype."""
    num_parts, blocks = sum(parts.num_parts), (parts.reads_N, parts.writes_N)
    return (
        num_parts <= len(parts.sizes)
        and sum(parts.sizes) <= num_tokens
        and all(x_N.dtype == torch.int64 and len(x_N) >= num_parts for x_N in blocks)
    )


def _supports_convolution(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_BWC: torch.Tensor,
) -> bool:
    """Return whether the kernel supports the dtypes, the shapes, the layouts and the width."""
    num_channels, width = weight_CW.shape
    tensors = (x_TC, weight_CW, bias_C, states_BWC[0])
    is_dense = width < 3 or states_BWC.stride(1) == num_channels
    return (
        x_TC.dtype in _DTYPES
        and all(x is None or (x.dtype == x_TC.dtype and x.stride(-1) == 1) for x in tensors)
        and x_TC.shape[1] == num_channels
        and (bias_C is None or len(bias_C) == num_channels)
        and states_BWC.shape[1:] == (width - 1, num_channels)
        and is_dense
        and 2 <= width <= MAX_CONV_WIDTH
    )


def _supports_attention(inputs: LinearAttentionInputs, states_BHKV: torch.Tensor) -> bool:
    """Return whether the kernel supports the dtypes, the shapes and the layouts."""
    q_TGK, k_TGK, v_THV, steps_TH = inputs.q_TGK, inputs.k_TGK, inputs.v_THV, inputs.steps_TH
    tensors = (q_TGK, k_TGK, v_THV, steps_TH, inputs.beta_TH)
    factors = (inputs.step_bias_H, inputs.rates_H, inputs.skip_H)
    dtype, (num_tokens, num_heads, value_size) = v_THV.dtype, v_THV.shape
    logits = (steps_TH, inputs.beta_TH)
    return (
        dtype in _DTYPES
        and all(x is None or (x.dtype == dtype and _has_dense_rows(x)) for x in tensors)
        and all(x is None or x.shape == (num_tokens, num_heads) for x in logits)
        and all(x is None or _is_factor(x, num_heads) for x in factors)
        and k_TGK.shape == q_TGK.shape
        and len(q_TGK) == num_tokens
        and num_heads % q_TGK.shape[1] == 0
        and states_BHKV.dtype == torch.float32
        and states_BHKV[0].is_contiguous()
        and states_BHKV.shape[1:] == (num_heads, q_TGK.shape[2], value_size)
    )


def _supports_recurrence(inputs: GatedRecurrenceInputs, states_BC: torch.Tensor) -> bool:
    """Return whether the kernel supports the dtypes, the shapes and the layouts."""
    values = (inputs.x_TC, inputs.input_gates_TC, inputs.decay_gates_TC)
    factors = (inputs.input_bias_C, inputs.decay_bias_C, inputs.rates_C, states_BC)
    dtype, shape = inputs.x_TC.dtype, inputs.x_TC.shape
    return (
        dtype in _DTYPES
        and all(x.dtype == dtype and x.stride(-1) == 1 and x.shape == shape for x in values)
        and all(_is_factor(x, shape[1]) for x in factors)
    )


def _supports_norm(x_TGI: torch.Tensor, gate_TGI: torch.Tensor, weight_GI: torch.Tensor) -> bool:
    """Return whether the kernel supports the dtypes, the shapes and the layouts."""
    return (
        x_TGI.dtype == torch.float32
        and x_TGI.is_contiguous()
        and gate_TGI.dtype == weight_GI.dtype == torch.bfloat16
        and gate_TGI.shape == x_TGI.shape
        and _has_dense_rows(gate_TGI)
        and weight_GI.shape in (x_TGI.shape[1:], x_TGI.shape[2:])
        and weight_GI.is_contiguous()
    )


def _is_factor(x: torch.Tensor, size: int) -> bool:
    """Return whether the last dimension has `size` contiguous float32 numbers."""
    return x.dtype == torch.float32 and x.stride(-1) == 1 and x.shape[-1] == size


def _has_dense_rows(x: torch.Tensor) -> bool:
    """Return whether the values of each token are contiguous. x: [T, …]."""
    size = 1
    for dim in range(x.dim() - 1, 0, -1):
        if x.shape[dim] > 1 and x.stride(dim) != size:
            return False
        size *= x.shape[dim]
    return True
