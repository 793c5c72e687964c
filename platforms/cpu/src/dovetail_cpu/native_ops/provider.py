"""The op provider `native`: norms, rotary embedding, routers and others, in native kernels.

They compute in bfloat16 on rows with contiguous features and any stride between rows. Other cases
use torch. The argument structs are reused for each call, so an instance serves one model that one
thread runs.
Dimensions: T tokens, D features of the last dimension, H heads, K key-value heads, S head size,
P positions, N query and key-value heads together; R rows and V width of logits or of a table;
of routers: K experts of a token.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from dovetail.interfaces.ops import ExpertRouting, RouterWeights
from dovetail_cpu.linear_kernel import pointer_to
from dovetail_cpu.native_ops.latent_and_gates import NativeLatentAndGates
from dovetail_cpu.native_ops.layouts import (
    NUMBERS,
    has_rows,
    have_equal_rows,
    is_changeable,
    is_rotary,
    is_vector,
)
from dovetail_cpu.native_ops.states import NativeStates
from dovetail_cpu_kernels.ops import OPS, op
from dovetail_torch.layers.torch_ops import TorchOps

_TORCH = TorchOps()


class NativeOps(NativeStates, NativeLatentAndGates):
    """Computes in float32 on bfloat16 inputs and outputs."""

    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})
    batch_invariant: ClassVar[frozenset[str]] = frozenset({"bfloat16"})

    def __init__(self) -> None:
        NativeStates.__init__(self)
        NativeLatentAndGates.__init__(self)
        self._norm, self._call_norm = OPS["rms_norm"](), op("rms_norm")
        self._add_norm, self._call_add_norm = OPS["add_rms_norm"](), op("add_rms_norm")
        self._layer_norm, self._call_layer_norm = OPS["layer_norm"](), op("layer_norm")
        self._rotary, self._call_rotary = OPS["rotary"](), op("rotary")
        self._silu, self._call_silu = OPS["silu_mul"](), op("silu_mul")
        self._embedding, self._call_embedding = OPS["embedding"](), op("embedding")
        self._argmax, self._call_argmax = OPS["argmax"](), op("argmax")
        self._mask, self._call_mask = OPS["mask"](), op("mask")
        self._router, self._call_router = OPS["select_experts"](), op("select_experts")

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight, a new tensor with any leading dimensions."""
        if not _supports_norm(x_TD, weight_D):
            return _TORCH.rms_norm(x_TD, weight_D, eps)
        return self._rms_norm(x_TD, weight_D, eps, 0.0)

    def offset_rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · (1 + weight), a new tensor."""
        if not _supports_norm(x_TD, weight_D):
            return _TORCH.offset_rms_norm(x_TD, weight_D, eps)
        return self._rms_norm(x_TD, weight_D, eps, 1.0)

    def _rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        y_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16)
        args = self._norm
        args.x, args.y = x_TD.data_ptr(), y_TD.data_ptr()
        args.num_outer, args.size = x_TD.shape[0], x_TD.shape[-1]
        args.x_outer_stride, args.y_outer_stride = x_TD.stride(0), y_TD.stride(0)
        if x_TD.dim() == 3:
            args.num_inner = x_TD.shape[1]
            args.x_inner_stride, args.y_inner_stride = x_TD.stride(1), y_TD.stride(1)
        else:
            args.num_inner = 1
        args.weight, args.eps, args.weight_offset = weight_D.data_ptr(), eps, offset
        self._call_norm(ctypes.addressof(args))
        return y_TD

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual). The sum is stored in `residual_TD`."""
        if not _supports_sum(x_TD, residual_TD, weight_D):
            return _TORCH.add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return self._add_rms_norm(x_TD, residual_TD, weight_D, (eps, 0.0)), residual_TD

    def add_offset_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and the sum, which is stored in `residual_TD`."""
        if not _supports_sum(x_TD, residual_TD, weight_D):
            return _TORCH.add_offset_rms_norm(x_TD, residual_TD, weight_D, eps)
        return self._add_rms_norm(x_TD, residual_TD, weight_D, (eps, 1.0)), residual_TD

    def _add_rms_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        constants: tuple[float, float],
    ) -> torch.Tensor:
        """Return the norm of the sum. constants: eps, and what is added to the weight."""
        y_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16)
        args = self._add_norm
        args.x, args.residual, args.y = x_TD.data_ptr(), residual_TD.data_ptr(), y_TD.data_ptr()
        args.num_rows, args.size = x_TD.shape
        args.x_stride, args.residual_stride = x_TD.stride(0), residual_TD.stride(0)
        args.y_stride = y_TD.stride(0)
        args.weight, (args.eps, args.weight_offset) = weight_D.data_ptr(), constants
        self._call_add_norm(ctypes.addressof(args))
        return y_TD

    def layer_norm(
        self,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Return (x - mean) / sqrt(variance + eps) · weight + bias, a new tensor.

        x may have any leading dimensions.
        """
        if not (has_rows(x_TD) and all(is_vector(v, x_TD.shape[1]) for v in (weight_D, bias_D))):
            return _TORCH.layer_norm(x_TD, weight_D, bias_D, eps)
        return self._normalize(x_TD, None, weight_D, bias_D, eps)

    def add_layer_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (layer_norm(x + residual), x + residual). The sum is stored in `residual_TD`."""
        if not _supports_sum(x_TD, residual_TD, weight_D, bias_D):
            return _TORCH.add_layer_norm(x_TD, residual_TD, weight_D, bias_D, eps)
        return self._normalize(x_TD, residual_TD, weight_D, bias_D, eps), residual_TD

    def _normalize(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        weight_D: torch.Tensor | None,
        bias_D: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        y_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16)
        args = self._layer_norm
        args.x, args.y, args.residual = x_TD.data_ptr(), y_TD.data_ptr(), pointer_to(residual_TD)
        args.num_rows, args.size = x_TD.shape
        args.x_stride, args.y_stride = x_TD.stride(0), y_TD.stride(0)
        args.residual_stride = 0 if residual_TD is None else residual_TD.stride(0)
        args.weight, args.bias = pointer_to(weight_D), pointer_to(bias_D)
        args.eps = eps
        self._call_layer_norm(ctypes.addressof(args))
        return y_TD

    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions (NeoX style). Views of one new tensor."""
        is_served = (
            has_rows(q_THS, 3) and has_rows(k_TKS, 3) and q_THS.shape[::2] == k_TKS.shape[::2]
        )
        if not (is_served and is_rotary(positions_T, cos_sin_PS, *q_THS.shape[::2])):
            return _TORCH.rotary_embedding(q_THS, k_TKS, positions_T, cos_sin_PS)
        num_tokens, num_heads, head_size = q_THS.shape
        num_kv_heads = k_TKS.shape[1]
        turned_TNS = torch.empty(
            (num_tokens, num_heads + num_kv_heads, head_size), dtype=torch.bfloat16
        )
        args = self._rotary
        args.q, args.k, args.q_out = q_THS.data_ptr(), k_TKS.data_ptr(), turned_TNS.data_ptr()
        args.k_out = args.q_out + num_heads * head_size * 2
        args.positions, args.num_tokens = positions_T.data_ptr(), num_tokens
        args.q_token_stride, args.q_head_stride = q_THS.stride(0), q_THS.stride(1)
        args.k_token_stride, args.k_head_stride = k_TKS.stride(0), k_TKS.stride(1)
        args.q_out_token_stride = args.k_out_token_stride = turned_TNS.stride(0)
        args.q_out_head_stride = args.k_out_head_stride = head_size
        args.cos_sin, args.rotary_dim = cos_sin_PS.data_ptr(), cos_sin_PS.shape[1]
        args.num_heads, args.num_kv_heads, args.head_size = num_heads, num_kv_heads, head_size
        self._call_rotary(ctypes.addressof(args))
        q_turned_THS, k_turned_TKS = turned_TNS.split_with_sizes((num_heads, num_kv_heads), dim=1)
        return q_turned_THS, k_turned_TKS

    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half, a new tensor."""
        if not has_rows(x_T2D) or x_T2D.shape[1] % 2:
            return _TORCH.silu_and_mul(x_T2D)
        size = x_T2D.shape[1] // 2
        y_TD = torch.empty((x_T2D.shape[0], size), dtype=torch.bfloat16)
        args = self._silu
        args.x, args.y = x_T2D.data_ptr(), y_TD.data_ptr()
        args.num_rows, args.size = y_TD.shape
        args.x_stride, args.y_stride = x_T2D.stride(0), size
        self._call_silu(ctypes.addressof(args))
        return y_TD

    def select_experts(
        self, x_TD: torch.Tensor, router: RouterWeights, routing: ExpertRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token, int64 [T, K], best first, and their weights, float32.

        Experts with equal scores are ordered by their index.
        """
        if not _supports_router(x_TD, router):
            return _TORCH.select_experts(x_TD, router, routing)
        args, shape_TK = self._router, (x_TD.shape[0], routing.top_k)
        experts_TK = torch.empty(shape_TK, dtype=torch.int64)
        weights_TK = torch.empty(shape_TK, dtype=torch.float32)
        args.x, args.weight = x_TD.data_ptr(), router.weight_ED.data_ptr()
        args.bias, args.correction = pointer_to(router.bias_E), pointer_to(router.correction_E)
        args.experts, args.weights = experts_TK.data_ptr(), weights_TK.data_ptr()
        args.num_tokens, args.size = x_TD.shape
        args.num_experts = router.weight_ED.shape[0]
        args.x_stride, args.weight_stride = x_TD.stride(0), router.weight_ED.stride(0)
        args.top_k, args.scale = routing.top_k, routing.scale
        args.num_groups, args.top_groups = routing.num_groups, routing.top_groups
        args.sigmoid, args.renormalize = routing.scores == "sigmoid", routing.renormalize
        self._call_router(ctypes.addressof(args))
        return experts_TK, weights_TK

    def embedding(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids as a new tensor."""
        if not (has_rows(table_VD) and is_vector(ids_T, ids_T.numel(), torch.int64)):
            return _TORCH.embedding(ids_T, table_VD)
        size = table_VD.shape[1]
        y_TD = torch.empty((ids_T.shape[0], size), dtype=torch.bfloat16)
        args = self._embedding
        args.ids, args.y, args.table = ids_T.data_ptr(), y_TD.data_ptr(), table_VD.data_ptr()
        args.num_tokens, args.size = y_TD.shape
        args.y_stride, args.table_stride = size, table_VD.stride(0)
        self._call_embedding(ctypes.addressof(args))
        return y_TD

    def best_tokens(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the argmax of each row, int64 [R]. The first column if several are equal."""
        is_served = logits_RV.dtype in NUMBERS and logits_RV.dim() == 2
        if not (is_served and logits_RV.stride(1) == 1 and logits_RV.numel()):
            return _TORCH.best_tokens(logits_RV)
        ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
        args = self._argmax
        args.logits, args.ids = logits_RV.data_ptr(), ids_R.data_ptr()
        args.num_rows, args.size = logits_RV.shape
        args.stride, args.is_float32 = logits_RV.stride(0), logits_RV.dtype == torch.float32
        self._call_argmax(ctypes.addressof(args))
        return ids_R

    def mask_tokens(
        self, logits_SV: torch.Tensor, rows_G: torch.Tensor, bits_GB: torch.Tensor
    ) -> None:
        """Set the logits of forbidden tokens to -inf, in place."""
        is_served = is_changeable(logits_SV) and is_vector(rows_G, len(bits_GB), torch.int64)
        is_mask = bits_GB.dtype == torch.uint8 and bits_GB.dim() == 2 and bits_GB.is_contiguous()
        if not (is_served and is_mask and 8 * bits_GB.shape[1] >= logits_SV.shape[1]):
            _TORCH.mask_tokens(logits_SV, rows_G, bits_GB)
            return
        args = self._mask
        args.logits, args.stride = logits_SV.data_ptr(), logits_SV.stride(0)
        args.rows, args.bits = rows_G.data_ptr(), bits_GB.data_ptr()
        args.num_rows, args.row_bytes = bits_GB.shape
        args.size, args.is_float32 = logits_SV.shape[1], logits_SV.dtype == torch.float32
        self._call_mask(ctypes.addressof(args))


def _supports_norm(x_TD: torch.Tensor, weight_D: torch.Tensor) -> bool:
    """Return whether the kernel supports a norm of the last of two or three dimensions."""
    return (
        x_TD.dim() in (2, 3) and has_rows(x_TD, x_TD.dim()) and is_vector(weight_D, x_TD.shape[-1])
    )


def _supports_sum(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, *factors: torch.Tensor | None
) -> bool:
    """Return whether the kernel supports a norm of x + residual with these weights."""
    is_served = have_equal_rows(x_TD, residual_TD) and is_changeable(residual_TD)
    return is_served and all(is_vector(factor_D, x_TD.shape[1]) for factor_D in factors)


def _supports_router(x_TD: torch.Tensor, router: RouterWeights) -> bool:
    """Return whether the kernel supports the dtypes, the shapes and the layouts."""
    if not (has_rows(x_TD) and has_rows(router.weight_ED)):
        return False
    num_experts, size = router.weight_ED.shape
    return (
        x_TD.shape[1] == size
        and is_vector(router.bias_E, num_experts)
        and is_vector(router.correction_E, num_experts, torch.float32)
    )
