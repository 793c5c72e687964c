"""Ops in float64, one formula after the other: the fake of the op provider contract.

torch is imported by those who hand over tensors, not here.
Legend: T tokens, D features, H query heads, K key-value heads, S head size, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces.ops import Ops

if TYPE_CHECKING:
    import torch


class FakeOps(Ops):
    """Slow and right; every result is a new tensor of the input's dtype."""

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight."""
        x = x_TD.double()
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (x * scale * weight_D.double()).to(x_TD.dtype)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""
        sum_TD = (x_TD.double() + residual_TD.double()).to(x_TD.dtype)
        return self.rms_norm(sum_TD, weight_D, eps), sum_TD

    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions in halves."""
        cos_sin_TS = cos_sin_PS[positions_T].double()
        return self._rotate(q_THS, cos_sin_TS), self._rotate(k_TKS, cos_sin_TS)

    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half."""
        gate_TD, up_TD = x_T2D.double().chunk(2, dim=-1)
        return (gate_TD * gate_TD.sigmoid() * up_TD).to(x_T2D.dtype)

    def _rotate(self, x_TNS: torch.Tensor, cos_sin_TS: torch.Tensor) -> torch.Tensor:
        half = cos_sin_TS.shape[-1] // 2
        turned_TNS = x_TNS.double().clone()
        for i in range(half):
            cos_T1, sin_T1 = cos_sin_TS[:, None, i], cos_sin_TS[:, None, half + i]
            left_TN, right_TN = x_TNS[..., i].double(), x_TNS[..., half + i].double()
            turned_TNS[..., i] = left_TN * cos_T1 - right_TN * sin_T1
            turned_TNS[..., half + i] = right_TN * cos_T1 + left_TN * sin_T1
        return turned_TNS.to(x_TNS.dtype)
