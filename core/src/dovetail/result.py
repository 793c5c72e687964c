"""What a worker hands back for one plan, as columns in plan order.

Immutable once handed over. Log-probabilities are objects, since only the requests that asked for
them pay for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobColumns:
    """Log-probabilities at some successive positions of one request, flat.

    Position i owns the next counts[i] entries: first the token that stands there, then the best
    tokens, best first (the token itself may be among them again).
    counts: int32. token_ids: int32. logprobs: float32, natural logarithm.
    ranks: int32, one a position: how many tokens are at least as likely as the one that stands
        there, itself included, so 1 is the best.
    """

    counts: array[int]
    token_ids: array[int]
    logprobs: array[float]
    ranks: array[int]

    def first(self, num_positions: int) -> LogprobColumns:
        """Return the columns of their first `num_positions` positions."""
        end = sum(self.counts[:num_positions])
        return LogprobColumns(
            counts=self.counts[:num_positions],
            token_ids=self.token_ids[:end],
            logprobs=self.logprobs[:end],
            ranks=self.ranks[:num_positions],
        )

    def after(self, num_positions: int) -> LogprobColumns:
        """Return the columns without their first `num_positions` positions."""
        first = sum(self.counts[:num_positions])
        return LogprobColumns(
            counts=self.counts[num_positions:],
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:],
            ranks=self.ranks[num_positions:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The tokens that a step sampled.

    step_id: the plan's.
    num_sampled: uint8, one a run, in plan order: tokens sampled by it (0 where `samples` was 0;
        more than 1 only where drafts were verified).
    token_ids: int32; the sampled tokens of all runs, one after the other.
    logprobs: run index to the log-probabilities of its sampled tokens, where they were requested.
    prompt_logprobs: run index to those of the prompt tokens that follow the positions the run
        computed, in order: a run over [s, e) reports positions s + 1 to min(e, num_prompt - 1).
    num_drafts: uint8, one a run: drafts that the worker now holds for its row, to be verified by
        the row's next run or dropped; 0 where nothing was sampled. Empty if no row has any.
    kv_transfer: what the KV connector's worker side tells its scheduler side; empty for nothing.
    errors: run index to why its request cannot go on, a sentence for the user. The request ends
        with an error, and what the run sampled is dropped; the other runs are not affected.
    """

    step_id: int
    num_sampled: array[int]
    token_ids: array[int]
    logprobs: Mapping[int, LogprobColumns] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, LogprobColumns] = field(default_factory=dict)
    num_drafts: array[int] = field(default_factory=lambda: array("B"))
    kv_transfer: bytes = b""
    errors: Mapping[int, str] = field(default_factory=dict)
