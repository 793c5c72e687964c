"""The operations with states by the native kernels, for the op provider `native`.

A request's results have the same bits in every batch. Cases that the kernels do not support use
torch.
Dimensions: T tokens, N parts, B blocks, C channels, W kernel size, H heads, G groups of heads,
K and V features of a key and of a value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from dovetail.interfaces.ops import LinearAttentionInputs, Ops, StateParts
from dovetail_cpu.linear_kernel import pointer_to
from dovetail_cpu_kernels.ops import OPS, op
from dovetail_cpu_kernels.states import MAX_CONV_WIDTH
from dovetail_cpu_kernels.states import StateParts as NativeParts
from dovetail_torch.layers.torch_ops import TorchOps

_TORCH = TorchOps()


class NativeStates(Ops):
    """Convolution of bfloat16 inputs, and linear attention in float32."""

    def __init__(self) -> None:
        self._conv, self._call_conv = OPS["causal_conv"](), op("causal_conv")
        self._attention, self._call_attention = OPS["linear_attention"](), op("linear_attention")

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_BWC: torch.Tensor,
        parts: StateParts,
    ) -> torch.Tensor:
        """Return silu(convolution + bias), a new tensor, and update the states."""
        tensors = (x_TC, weight_CW, states_BWC[0])
        is_bf16 = all(x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in tensors)
        width = weight_CW.shape[1]
        is_dense = width < 3 or states_BWC.stride(1) == x_TC.shape[1]
        if not (is_bf16 and is_dense and width <= MAX_CONV_WIDTH):
            return _TORCH.causal_conv(x_TC, weight_CW, bias_C, states_BWC, parts)
        y_TC = torch.empty(x_TC.shape, dtype=torch.bfloat16)
        native, _kept = _native_parts(parts)
        args = self._conv
        args.parts = ctypes.addressof(native)
        args.x, args.weight, args.bias = x_TC.data_ptr(), weight_CW.data_ptr(), pointer_to(bias_C)
        args.states, args.y = states_BWC.data_ptr(), y_TC.data_ptr()
        args.channels, args.width = x_TC.shape[1], width
        args.x_stride, args.weight_stride = x_TC.stride(0), weight_CW.stride(0)
        args.block_stride, args.y_stride = states_BWC.stride(0), y_TC.stride(0)
        self._call_conv(ctypes.addressof(args))
        return y_TC

    def linear_attention(
        self, inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the outputs of linear attention, a new tensor, and update the states."""
        if states_BHKV.dtype != torch.float32 or not states_BHKV[0].is_contiguous():
            return _TORCH.linear_attention(inputs, states_BHKV, parts)
        q_TGK, k_TGK, v_THV = (_as_float(x) for x in (inputs.q_TGK, inputs.k_TGK, inputs.v_THV))
        factors_TH = inputs.decay_TH.exp().contiguous()
        beta_TH = None if inputs.beta_TH is None else _as_float(inputs.beta_TH)
        y_THV = torch.empty_like(v_THV)
        native, _kept = _native_parts(parts)
        args = self._attention
        args.parts = ctypes.addressof(native)
        args.q, args.k, args.v = q_TGK.data_ptr(), k_TGK.data_ptr(), v_THV.data_ptr()
        args.factors, args.betas = factors_TH.data_ptr(), pointer_to(beta_TH)
        args.states, args.y = states_BHKV.data_ptr(), y_THV.data_ptr()
        _, args.num_heads, args.value_size = v_THV.shape
        _, args.num_groups, args.key_size = q_TGK.shape
        args.block_stride = states_BHKV.stride(0)
        self._call_attention(ctypes.addressof(args))
        return y_THV.to(inputs.v_THV.dtype)


def _as_float(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).contiguous()


def _native_parts(parts: StateParts) -> tuple[NativeParts, Sequence[object]]:
    """Return the struct of the parts, and the objects that must be kept until the call returns."""
    sizes = (ctypes.c_int64 * len(parts.sizes))(*parts.sizes)
    num_parts = (ctypes.c_int64 * len(parts.num_parts))(*parts.num_parts)
    reads_N, writes_N = parts.reads_N.contiguous(), parts.writes_N.contiguous()
    native = NativeParts(
        sizes=ctypes.addressof(sizes),
        num_parts=ctypes.addressof(num_parts),
        reads=reads_N.data_ptr(),
        writes=writes_N.data_ptr(),
        num_requests=len(num_parts),
    )
    return native, (sizes, num_parts, reads_N, writes_N)
