"""The contract of an op provider: the small fused operations between the matrix products.

Legend: T tokens, D features of the last dimension, H heads, S head size; of logits: R rows,
V vocabulary.
All calls return new tensors or reuse their inputs' memory, as each docstring says; none keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class Ops(ABC):
    """Norms, rotary embedding, activations, look-ups and greedy choice of one kind of device.

    Stateless; one instance serves a whole model. Inputs and outputs share dtype and device unless
    stated; sums are accumulated in float32.
    """

    CONTRACT: ClassVar[str] = "ops"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    device_types: ClassVar[frozenset[str]] = frozenset()
    """Device types it runs on; empty for any."""
    batch_invariant: ClassVar[frozenset[str]] = frozenset()
    """Names of the dtypes in which a row's result has the same bits whatever the other rows."""

    def __init__(self) -> None:  # noqa: B027  # a default that may stay
        """Make it, without arguments.

        A plugin with an options model takes the keyword `options=None`: a mapping, validated.
        """

    @abstractmethod
    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight over the last dimension (any leading ones).

        Source: Zhang and Sennrich 2019, arXiv:1910.07467.
        """

    @abstractmethod
    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual); `residual_TD` may be overwritten."""

    @abstractmethod
    def rotary_embedding(
        self,
        q_THS: torch.Tensor,
        k_TKS: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, rotated by their positions in halves ("neox" style).

        positions_T: int64. cos_sin_PS: float32 [P positions, rotary size]; the first half of a row
        are cosines, the second half sines, of position · frequency. Features beyond the rotary size
        pass through. Source: Su et al. 2021, arXiv:2104.09864.
        """

    @abstractmethod
    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half."""

    def embedding(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return the table's rows by id, a new tensor [T, D]. Ids are int64, each below V."""
        return table_VD.index_select(0, ids_T)

    def best_tokens(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the column of each row's greatest number, the first of several, int64 [R].

        Any float dtype. A row of nothing but -inf gives 0; a NaN counts as the greatest.
        """
        return logits_RV.argmax(-1)
