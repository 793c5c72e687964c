"""The contract of an op provider: the small fused operations between the matrix products.

Every operation is optional: a provider overrides those that it has, and the torch layer computes
the others. A new operation is added with a torch implementation, so existing providers stay valid.
Legend: T tokens, D features of the last dimension, H heads, S head size; of logits: R rows,
V vocabulary.
Calls return new tensors or reuse their inputs' memory, as each docstring says; none keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def operation(method: _Method) -> _Method:
    """Mark a method of `Ops` as an operation, which a provider may leave out."""
    method.is_optional = True  # type: ignore[attr-defined]
    return method


def overridden_operations(ops_cls: type) -> frozenset[str]:
    """Return the names of the operations that a provider implements itself."""
    return frozenset(
        name
        for name, method in vars(Ops).items()
        if getattr(method, "is_optional", False) and getattr(ops_cls, name, method) is not method
    )


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


class Ops:
    """Norms, rotary embedding, activations, look-ups and draws of one kind of device.

    Stateless; one instance serves a whole model. Inputs and outputs share dtype and device unless
    stated; sums are accumulated in float32. An operation that is not overridden is never called:
    the torch layer's own is called in its place.
    """

    CONTRACT: ClassVar[str] = "ops"
    CONTRACT_VERSION: ClassVar[str] = "0.4"
    device_types: ClassVar[frozenset[str]] = frozenset()
    """Device types it runs on; empty for any."""
    batch_invariant: ClassVar[frozenset[str]] = frozenset()
    """Names of the dtypes in which a row's result has the same bits whatever the other rows.

    Counts only where the provider overrides all of `ROUNDED`: torch does not promise it.
    """

    def __init__(self) -> None:
        """Make it, without arguments.

        A plugin with an options model takes the keyword `options=None`: a mapping, validated.
        """

    @operation
    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight over the last dimension (any leading ones).

        Source: Zhang and Sennrich 2019, arXiv:1910.07467.
        """
        raise NotImplementedError

    @operation
    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual); `residual_TD` may be overwritten."""
        raise NotImplementedError

    @operation
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
        raise NotImplementedError

    @operation
    def silu_and_mul(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) · second half."""
        raise NotImplementedError

    @operation
    def embedding(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return the table's rows by id, a new tensor [T, D]. Ids are int64, each below V."""
        raise NotImplementedError

    @operation
    def best_tokens(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the column of each row's greatest number, the first of several, int64 [R].

        Any float dtype. A row of nothing but -inf gives 0; a NaN counts as the greatest.
        """
        raise NotImplementedError

    @operation
    def draw_tokens(self, logits_RV: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """Return a token a row, int64 [R], by temperature, min-p, top-k and top-p, in that order.

        Used on devices that work asynchronously, so it must not wait for the device. Without it
        the sampler draws with torch operations.
        Greater logits come first, and lower columns among equals: top-k keeps exactly k tokens,
        top-p then the fewest that make up its share of what is left, the best one always.
        Each row's token is a function of its own logits, numbers, seed and position only, so that
        batch mates and history change nothing. Logits: any float dtype; may be overwritten.
        Source of the drawing: Gumbel 1954; max of logit + Gumbel noise.
        """
        raise NotImplementedError

    @operation
    def prepare_inputs(self, columns: StepColumns) -> None:
        """Write what `columns` names as made; only read the rest. Does not wait for the device.

        Used on devices that work asynchronously.
        """
        raise NotImplementedError


ROUNDED = frozenset({"rms_norm", "add_rms_norm", "rotary_embedding", "silu_and_mul"})
"""Operations whose results are rounded, so that torch may give other bits in another batch."""
