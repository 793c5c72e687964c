"""The contract of an op provider: the small fused operations between the matrix products.

Legend: T tokens, D features of the last dimension, H heads, S head size; of logits: R rows,
V vocabulary.
All calls return new tensors or reuse their inputs' memory, as each docstring says; none keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


class Ops(ABC):
    """Norms, rotary embedding, activations, look-ups and greedy choice of one kind of device.

    Stateless; one instance serves a whole model. Inputs and outputs share dtype and device unless
    stated; sums are accumulated in float32.
    provides: capability ids of the optional contracts below that the class implements.
    """

    CONTRACT: ClassVar[str] = "ops"
    CONTRACT_VERSION: ClassVar[str] = "0.3"
    provides: ClassVar[frozenset[str]] = frozenset()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawColumns:
    """How each row of logits draws its token: device tensors of length R.

    temperature_R: float32; 0 for the best token. top_k_R: int32; V or more for all. top_p_R,
    min_p_R: float32; 1 and 0 for all. seeds_R: int64, the bits of an unsigned number.
    positions_R: int64; number of the row's tokens so far.
    """

    temperature_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    seeds_R: torch.Tensor
    positions_R: torch.Tensor


class Draws(Protocol):
    """Capability "draw": tokens at random, without a word from the host in between."""

    def draw_tokens(self, logits_RV: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """Return a token a row, int64 [R], by temperature, min-p, top-k and top-p, in that order.

        Greater logits come first, and lower columns among equals: top-k keeps exactly k tokens,
        top-p then the fewest that make up its share of what is left, the best one always.
        Each row's token is a function of its own logits, numbers, seed and position: of nothing
        else, so that batch mates and history change nothing. Logits: any float dtype; may be
        overwritten. Source of the drawing: Gumbel 1954; max of logit + Gumbel noise.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """A step in the host's few words and what the device makes of them; all device tensors.

    Given, one entry a run: rows_R, starts_R: int32; the run's row, and the position of its first
    token. query_start_R1: int32 [R + 1]; each run's first token among the T. Given of all rows:
    token_ids_RL: int32 [rows, max_model_len]; block_tables: one int32 [rows, M] a KV-cache group;
    block_sizes: of those, in tokens.
    Made: input_ids_T, positions_T: int64; seq_lens_R: int32; the start and the run's tokens.
    slots_T: one int64 [T] a group; block · size + offset. block_tables_RM: one int32 [R, M'] a
    group, M' ≤ M; the rows' tables in the order of the runs.
    num_tokens: T. longest: most tokens of a run.
    """

    rows_R: torch.Tensor
    starts_R: torch.Tensor
    query_start_R1: torch.Tensor
    token_ids_RL: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    block_sizes: tuple[int, ...]
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    seq_lens_R: torch.Tensor
    slots_T: tuple[torch.Tensor, ...]
    block_tables_RM: tuple[torch.Tensor, ...]
    num_tokens: int
    longest: int


class PreparesInputs(Protocol):
    """Capability "prepare_inputs": what a step reads, made on the device from its state there."""

    def prepare_inputs(self, columns: StepColumns) -> None:
        """Write what `columns` names as made; only read the rest. Waits for nothing."""
