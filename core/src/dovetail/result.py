"""The result of one plan from a worker, as columns in plan order.

Results are immutable. Log-probabilities are stored per request, because few requests need them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobColumns:
    """Log-probabilities at consecutive positions of one request, as flat columns.

    Position i has the next counts[i] entries: first its own token, then the most likely tokens in
    order (its own token may occur again).
    counts: int32. token_ids: int32. logprobs: float32, natural logarithm.
    ranks: int32, one per position: number of tokens that are at least as likely as its own token,
        itself included. 1 for the most likely token.
    """

    counts: array[int]
    token_ids: array[int]
    logprobs: array[float]
    ranks: array[int]

    def first(self, num_positions: int) -> LogprobColumns:
        """Return the columns of the first `num_positions` positions."""
        end = sum(self.counts[:num_positions])
        return LogprobColumns(
            counts=self.counts[:num_positions],
            token_ids=self.token_ids[:end],
            logprobs=self.logprobs[:end],
            ranks=self.ranks[:num_positions],
        )

    def after(self, num_positions: int) -> LogprobColumns:
        """Return the columns without the first `num_positions` positions."""
        first = sum(self.counts[:num_positions])
        return LogprobColumns(
            counts=self.counts[num_positions:],
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:],
            ranks=self.ranks[num_positions:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledTensor:
    """The pooled result of a request.

    shape: (number of features), or (number of tokens, number of features) for a result for each
    token. values: float32, row by row.
    """

    shape: tuple[int, ...]
    values: array[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The result of a step.

    step_id: the step_id of the plan.
    num_sampled: uint8, one per scheduled request, in plan order: number of sampled tokens (0 if
        `samples` was 0; more than 1 only if drafts were verified).
    token_ids: int32; the sampled tokens of all scheduled requests, concatenated.
    logprobs: position in the plan to the log-probabilities of the request's sampled tokens, if
        requested.
    prompt_logprobs: position in the plan to the log-probabilities of prompt tokens: a step that
        computes tokens [s, e) reports positions s + 1 to min(e, num_prompt - 1).
    num_drafts: uint8, one per scheduled request: drafts that the worker now holds for the next step
        of the request; 0 if nothing was sampled. Empty if no request has drafts.
    kv_transfer: message of the KV connector's worker side to its scheduler side; empty for none.
    pooled: position in the plan to the pooled result, for each request with `pooling_params` whose
        `samples` is 1. Such a request has no sampled tokens: its `num_sampled` is 0.
    errors: position in the plan to a message for the user. The request ends with this error, and
        its sampled tokens are ignored; other requests are not affected.
    """

    step_id: int
    num_sampled: array[int]
    token_ids: array[int]
    logprobs: Mapping[int, LogprobColumns] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, LogprobColumns] = field(default_factory=dict)
    num_drafts: array[int] = field(default_factory=lambda: array("B"))
    kv_transfer: bytes = b""
    errors: Mapping[int, str] = field(default_factory=dict)
    pooled: Mapping[int, PooledTensor] = field(default_factory=dict)
