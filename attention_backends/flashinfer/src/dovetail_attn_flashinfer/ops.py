"""The op provider `flashinfer`: norms, rotary embedding and activation with FlashInfer's kernels.

FlashInfer is imported when the ops are created, so that a missing FlashInfer can be reported.

Sampling is not among the operations. FlashInfer derives the random numbers of a request from its
position in the batch, keeps more than k tokens if the logits of some are equal, and has no argmax,
so a request with a seed would not be reproducible. torch does the sampling.

Dimensions: T tokens, D features of the last dimension, H heads, K key-value heads, S head size, P
positions.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import ClassVar

import torch

from dovetail.errors import ConfigError, ContractError
from dovetail.interfaces.ops import Ops
from dovetail_attn_flashinfer.device_checks import build_reasons, device_reasons, is_rocm

INSTEAD = "ops='triton' or ops='torch'"
VECTOR_BYTES = 16
"""Bytes that a thread of a kernel loads together, from an aligned address."""

ROTARY_VECTORS = {64: 8, 128: 8, 256: 8, 512: 16}
"""Features that a thread of the rotary kernel rotates, by head size."""
OTHER_VECTOR = 16

DTYPES = frozenset({"bfloat16", "float16"})
TORCH_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)

AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]


class FlashInferOps(Ops):
    """Computes in float32 on bfloat16 or float16 tensors. No call waits for the device.

    The kernels read aligned vectors: inputs at other addresses are copied first.
    """

    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    dtypes: ClassVar[frozenset[str]] = DTYPES

    def __init__(self) -> None:
        """Load FlashInfer. Raise ConfigError if this machine's GPU or torch is not supported."""
        self.check_device()
        from flashinfer import activation, norm, rope

        self._norm, self._rope, self._activation = norm, rope, activation

    @classmethod
    def check_device(cls) -> None:
        """Raise ConfigError unless this process's GPU can run the kernels."""
        reasons = build_reasons(rocm=is_rocm(), backend=INSTEAD)
        if not reasons and torch.cuda.is_available():
            reasons = device_reasons("", backend=INSTEAD)
        if reasons:
            raise ConfigError(f"ops='flashinfer' cannot be used: {'; '.join(reasons)}")

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight, a new tensor. Any leading dimensions."""
        return self._normalize(self._norm.rmsnorm, x_TD, weight_D, eps)

    def offset_rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · (1 + weight), a new tensor. Any leading dimensions."""
        return self._normalize(self._norm.gemma_rmsnorm, x_TD, weight_D, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual). The sum may overwrite `residual_TD`."""
        return self._add(self._norm.fused_add_rmsnorm, x_TD, residual_TD, weight_D, eps)

    def add_offset_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offset_rms_norm(x + residual), x + residual).

        The sum may overwrite `residual_TD`.
        """
        return self._add(self._norm.gemma_fused_add_rmsnorm, x_TD, residual_TD, weight_D, eps)

    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half, a new tensor."""
        check_dtype(x_T2D)
        size = x_T2D.shape[-1] // 2
        out_TD = x_T2D.new_empty((*x_T2D.shape[:-1], size))
        if out_TD.numel():
            x_T2D = x_T2D.contiguous()  # the kernel ignores strides
            self._activation.silu_and_mul(aligned(x_T2D, vector_bytes(size)), out=out_TD)
        return out_TD

    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions (NeoX style). Two new tensors.

        torch computes head sizes for which the kernel would be incorrect.
        """
        check_dtype(q_THS, k_TKS)
        size, rotary_dim = q_THS.shape[-1], cos_sin_PS.shape[-1]
        if not q_THS.shape[0] or not can_rotate(size, rotary_dim):
            cos_sin_T1R = cos_sin_PS.index_select(0, positions_T)[:, None]
            return rotated(q_THS, cos_sin_T1R), rotated(k_TKS, cos_sin_T1R)
        q_turned_THS, k_turned_TKS = self._rope.apply_rope_with_cos_sin_cache(
            positions_T.contiguous(),
            aligned(q_THS, VECTOR_BYTES),
            aligned(k_TKS, VECTOR_BYTES),
            size,
            cos_sin_PS.contiguous(),
        )
        return q_turned_THS, k_turned_TKS

    @staticmethod
    def _normalize(
        kernel: Callable[..., torch.Tensor], x: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        check_dtype(x, weight_D)
        size = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            rows = x if x.dim() in (2, 3) else x.reshape(-1, size)
            rows = aligned(rows, vector_bytes(size))
            kernel(rows, weight_D.contiguous(), eps, out=out.view(rows.shape))
        return out

    @staticmethod
    def _add(
        kernel: AddNorm,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_dtype(x, residual, weight_D)
        size = x.shape[-1]
        # The kernel overwrites its first argument with the norm, and x must not change.
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        total = aligned(residual.reshape(-1, size), vector_bytes(size))
        if normed.numel():
            kernel(normed.view(-1, size), total, weight_D.contiguous(), eps)
        return normed, total.view(x.shape)


def check_dtype(x: torch.Tensor, *others: torch.Tensor) -> None:
    """Raise ContractError unless the tensors have one dtype that the kernels support.

    The kernels would read a tensor of a different dtype as if it had the dtype of the first.
    """
    if x.dtype not in TORCH_DTYPES:
        raise ContractError(
            f"the op provider 'flashinfer' does not support {x.dtype}; it supports "
            f"{' and '.join(sorted(DTYPES))}. Choose {INSTEAD}"
        )
    for other in others:
        if other.dtype != x.dtype:
            raise ContractError(
                f"the op provider 'flashinfer' needs tensors of one dtype, but got {x.dtype} and "
                f"{other.dtype}. Choose {INSTEAD}"
            )


def vector_bytes(size: int) -> int:
    """Return the bytes that a thread loads together from rows of `size` features of 16 bits."""
    return gcd(VECTOR_BYTES, 2 * size)


def aligned(x: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Return x, or a copy if its features are not contiguous or its rows are not aligned."""
    starts = [x.storage_offset(), *x.stride()[:-1]]
    if x.stride(-1) == 1 and not any(x.element_size() * start % num_bytes for start in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def can_rotate(head_size: int, rotary_dim: int) -> bool:
    """Return whether the kernel supports these sizes. The kernel itself does not check them.

    The halves of the rotated features must consist of complete vectors. Heads of unusual sizes take
    a different kernel, which is used only for heads that are rotated completely.
    """
    vector = ROTARY_VECTORS.get(head_size)
    if vector is None:
        return rotary_dim == head_size and rotary_dim % (2 * OTHER_VECTOR) == 0
    return rotary_dim <= head_size and rotary_dim % (2 * vector) == 0


def rotated(x_TNS: torch.Tensor, cos_sin_T1R: torch.Tensor) -> torch.Tensor:
    """Return x with the first R features of each head rotated by torch, a new tensor."""
    rotary_dim = cos_sin_T1R.shape[-1]
    cos_T1F, sin_T1F = cos_sin_T1R.chunk(2, dim=-1)
    left, right = x_TNS[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = torch.cat((left * cos_T1F - right * sin_T1F, right * cos_T1F + left * sin_T1F), dim=-1)
    return torch.cat((turned.to(x_TNS.dtype), x_TNS[..., rotary_dim:]), dim=-1)
