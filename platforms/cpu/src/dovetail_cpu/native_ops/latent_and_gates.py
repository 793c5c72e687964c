"""Latent attention, gates, scales and shared experts in native kernels, for the provider `native`.

Cases that the kernels do not support use torch.
Dimensions: T tokens, D hidden size, H heads, L latent features, N features of a key that are not
rotated, R rotary features, F of all of them, I input and O output features of a head.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from dovetail.interfaces.ops import LatentWeights, Ops
from dovetail_cpu.linear_kernel import pointer_to
from dovetail_cpu.native_ops.layouts import (
    has_rows,
    have_equal_rows,
    is_changeable,
    is_rotary,
    is_vector,
)
from dovetail_cpu_kernels.ops import OPS, op
from dovetail_torch.layers.torch_ops import TorchOps

_TORCH = TorchOps()
_BYTES = 2  # of a bfloat16


class NativeLatentAndGates(Ops):
    """Computes in float32 on bfloat16 inputs and outputs."""

    def __init__(self) -> None:
        self._gate, self._call_gate = OPS["sigmoid_mul"](), op("sigmoid_mul")
        self._gelu, self._call_gelu = OPS["gelu_tanh_mul"](), op("gelu_tanh_mul")
        self._scale, self._call_scale = OPS["scale"](), op("scale")
        self._soft_cap, self._call_soft_cap = OPS["soft_cap"](), op("soft_cap")
        self._shared, self._call_shared = OPS["add_shared"](), op("add_shared")
        self._heads, self._call_heads = OPS["head_linear"](), op("head_linear")
        self._latent_norm, self._call_latent_norm = OPS["rms_norm"](), op("rms_norm")
        self._latent_rotary, self._call_latent_rotary = OPS["rotary"](), op("rotary")

    def sigmoid_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(gate), a new tensor."""
        if not have_equal_rows(x_TD, gate_TD):
            return _TORCH.sigmoid_and_mul(x_TD, gate_TD)
        y_TD = _fill_gate(self._gate, x_TD, gate_TD)
        self._call_gate(ctypes.addressof(self._gate))
        return y_TD

    def gelu_tanh_and_mul(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """Return x · gelu(gate), with the tanh approximation, a new tensor."""
        if not have_equal_rows(x_TD, gate_TD):
            return _TORCH.gelu_tanh_and_mul(x_TD, gate_TD)
        y_TD = _fill_gate(self._gelu, x_TD, gate_TD)
        self._call_gelu(ctypes.addressof(self._gelu))
        return y_TD

    def scale(self, x_TD: torch.Tensor, factor: float) -> torch.Tensor:
        """Return x · factor, stored in `x_TD`. bfloat16 or float32."""
        if not is_changeable(x_TD):
            return _TORCH.scale(x_TD, factor)
        _fill_scale(self._scale, x_TD, factor)
        self._call_scale(ctypes.addressof(self._scale))
        return x_TD

    def soft_cap(self, logits_RV: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap · tanh(logits / cap), stored in `logits_RV`. bfloat16 or float32."""
        if not is_changeable(logits_RV):
            return _TORCH.soft_cap(logits_RV, cap)
        _fill_scale(self._soft_cap, logits_RV, cap)
        self._call_soft_cap(ctypes.addressof(self._soft_cap))
        return logits_RV

    def add_shared_expert(
        self,
        y_TD: torch.Tensor,
        shared_TD: torch.Tensor,
        x_TD: torch.Tensor,
        gate_D: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return y + shared, or with a gate y + sigmoid(x · gate) · shared, stored in `y_TD`."""
        is_served = have_equal_rows(y_TD, shared_TD, x_TD) and is_changeable(y_TD)
        if not (is_served and is_vector(gate_D, y_TD.shape[1])):
            return _TORCH.add_shared_expert(y_TD, shared_TD, x_TD, gate_D)
        args = self._shared
        args.y, args.shared, args.x = y_TD.data_ptr(), shared_TD.data_ptr(), x_TD.data_ptr()
        args.gate = pointer_to(gate_D)
        args.num_tokens, args.size = y_TD.shape
        args.y_stride, args.shared_stride = y_TD.stride(0), shared_TD.stride(0)
        args.x_stride = x_TD.stride(0)
        self._call_shared(ctypes.addressof(args))
        return y_TD

    def head_linear(self, x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ of each head, a new tensor [T, H, O]."""
        is_served = has_rows(x_THI, 3) and weight_HOI.dtype == torch.bfloat16
        is_served = is_served and weight_HOI.shape[::2] == x_THI.shape[1:]
        if not (is_served and 1 in weight_HOI.stride()[1:]):
            return _TORCH.head_linear(x_THI, weight_HOI)
        y_THO = torch.empty((*x_THI.shape[:2], weight_HOI.shape[1]), dtype=torch.bfloat16)
        self._multiply(x_THI, weight_HOI, y_THO, 0)
        return y_THO

    def _multiply(
        self, x_THI: torch.Tensor, weight_HOI: torch.Tensor, y_THF: torch.Tensor, start: int
    ) -> None:
        """Write x · Wᵀ of each head to the features of `y_THF` from `start` on."""
        args = self._heads
        args.x, args.weight = x_THI.data_ptr(), weight_HOI.data_ptr()
        args.y = y_THF.data_ptr() + start * _BYTES
        args.num_tokens, args.num_heads, args.num_inputs = x_THI.shape
        args.num_outputs = weight_HOI.shape[1]
        args.x_stride, args.x_head_stride = x_THI.stride()[:2]
        args.y_stride, args.y_head_stride = y_THF.stride()[:2]
        head_stride, output_stride, input_stride = weight_HOI.stride()
        args.inputs_first = input_stride != 1
        args.weight_head_stride = head_stride
        args.weight_stride = input_stride if args.inputs_first else output_stride
        self._call_heads(ctypes.addressof(args))

    def latent_inputs(
        self,
        q_THF: torch.Tensor,
        latent_TF: torch.Tensor,
        weights: LatentWeights,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys of latent attention, new tensors."""
        key_HNL = weights.key_HNL
        if not _supports_latent(q_THF, latent_TF, weights, positions_T, cos_sin_PR):
            return _TORCH.latent_inputs(q_THF, latent_TF, weights, positions_T, cos_sin_PR)
        num_tokens, num_heads, _ = q_THF.shape
        _, num_features, rank = key_HNL.shape
        size = rank + cos_sin_PR.shape[1]
        queries_THF = torch.empty((num_tokens, num_heads, size), dtype=torch.bfloat16)
        keys_T1F = torch.empty((num_tokens, 1, size), dtype=torch.bfloat16)
        norm = self._latent_norm
        norm.x, norm.y, norm.weight = (x.data_ptr() for x in (latent_TF, keys_T1F, weights.norm_L))
        norm.num_outer, norm.num_inner, norm.size = num_tokens, 1, rank
        norm.x_outer_stride, norm.y_outer_stride = latent_TF.stride(0), size
        norm.eps = weights.eps
        self._call_latent_norm(ctypes.addressof(norm))
        rotary = self._latent_rotary
        rotary.q = q_THF.data_ptr() + num_features * _BYTES
        rotary.k = latent_TF.data_ptr() + rank * _BYTES
        rotary.q_out = queries_THF.data_ptr() + rank * _BYTES
        rotary.k_out = keys_T1F.data_ptr() + rank * _BYTES
        rotary.positions, rotary.num_tokens = positions_T.data_ptr(), num_tokens
        rotary.q_token_stride, rotary.q_head_stride = q_THF.stride()[:2]
        rotary.k_token_stride = latent_TF.stride(0)
        rotary.q_out_token_stride, rotary.q_out_head_stride = queries_THF.stride()[:2]
        rotary.k_out_token_stride = size
        rotary.cos_sin, rotary.num_heads, rotary.num_kv_heads = cos_sin_PR.data_ptr(), num_heads, 1
        rotary.head_size = rotary.rotary_dim = cos_sin_PR.shape[1]
        self._call_latent_rotary(ctypes.addressof(rotary))
        plain_THN = q_THF[..., :num_features]
        self._multiply(plain_THN, key_HNL.mT, queries_THF, 0)
        return queries_THF, keys_T1F


def _fill_gate(args: Any, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
    """Set the fields of a product with a gate. Return its result, not yet computed."""
    y_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16)
    args.x, args.gate, args.y = x_TD.data_ptr(), gate_TD.data_ptr(), y_TD.data_ptr()
    args.num_rows, args.size = x_TD.shape
    args.x_stride, args.gate_stride = x_TD.stride(0), gate_TD.stride(0)
    args.y_stride = y_TD.stride(0)
    return y_TD


def _fill_scale(args: Any, x_TD: torch.Tensor, factor: float) -> None:
    args.x, args.stride, args.factor = x_TD.data_ptr(), x_TD.stride(0), factor
    args.num_rows, args.size = x_TD.shape
    args.is_float32 = x_TD.dtype == torch.float32


def _supports_latent(
    q_THF: torch.Tensor,
    latent_TF: torch.Tensor,
    weights: LatentWeights,
    positions_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
) -> bool:
    """Return whether the kernels support the dtypes, the shapes and the layouts."""
    if not (has_rows(q_THF, 3) and has_rows(latent_TF) and has_rows(weights.key_HNL, 3)):
        return False
    num_tokens, num_heads, size = q_THF.shape
    _, num_features, rank = weights.key_HNL.shape
    num_rotary = cos_sin_PR.shape[-1]
    return (
        len(weights.key_HNL) == num_heads
        and size == num_features + num_rotary
        and latent_TF.shape == (num_tokens, rank + num_rotary)
        and is_vector(weights.norm_L, rank)
        and is_rotary(positions_T, cos_sin_PR, num_tokens, num_rotary)
    )
