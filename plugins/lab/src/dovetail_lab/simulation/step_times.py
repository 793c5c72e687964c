"""Step-time models, which compute the duration of a step from its plan.

All arithmetic is in integers, so that the times of a stretch of decode steps are exactly the sum of
the times of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.plan import SchedulerOutput
from dovetail_lab.simulation.previous_step import After
from dovetail_lab.simulation.setup import Times

_PS_PER_NS = 1000

_MAX_SCALAR = 8
"""Up to this number of requests, a loop over a step's requests is faster than numpy."""


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The work of a step, as sums over its scheduled requests.

    num_prefill_tokens, num_prefills: tokens and number of the requests with several tokens.
    num_decodes: requests with one token. num_kv_tokens: cached tokens that the decodes read.
    num_context_pairs: for each prefill, its tokens times the tokens before them, summed.
    num_joins: new requests. is_first: 1 if all requests are new, as in the first step after a
    pause.
    """

    num_prefill_tokens: int
    num_prefills: int
    num_decodes: int
    num_kv_tokens: int
    num_context_pairs: int
    num_joins: int
    is_first: int

    @classmethod
    def of(cls, plan: SchedulerOutput) -> StepFeatures:
        """Return the features of a plan."""
        if len(plan.rows) <= _MAX_SCALAR:
            return cls._of_few(plan)
        starts = np.frombuffer(plan.starts, dtype=np.int32).astype(np.int64)
        num_tokens = np.frombuffer(plan.num_tokens, dtype=np.int32).astype(np.int64)
        is_decode = num_tokens == 1
        num_decodes = int(np.count_nonzero(is_decode))
        num_kv_tokens = int(starts[is_decode].sum())
        is_first = int(len(plan.joins) == len(starts))
        if num_decodes == len(starts):
            return cls(0, 0, num_decodes, num_kv_tokens, 0, len(plan.joins), is_first)
        first, length = starts[~is_decode], num_tokens[~is_decode]
        pairs = first * length + length * (length + 1) // 2
        return cls(
            num_prefill_tokens=int(length.sum()),
            num_prefills=len(length),
            num_decodes=num_decodes,
            num_kv_tokens=num_kv_tokens,
            num_context_pairs=int(pairs.sum()),
            num_joins=len(plan.joins),
            is_first=is_first,
        )

    @classmethod
    def _of_few(cls, plan: SchedulerOutput) -> StepFeatures:
        """Return the features of a plan with few requests, faster than with numpy."""
        num_tokens = num_prefills = num_decodes = num_kv_tokens = pairs = 0
        for first, length in zip(plan.starts, plan.num_tokens, strict=True):
            if length == 1:
                num_decodes += 1
                num_kv_tokens += first
            else:
                num_prefills += 1
                num_tokens += length
                pairs += first * length + length * (length + 1) // 2
        is_first = int(len(plan.joins) == len(plan.rows))
        return cls(
            num_tokens, num_prefills, num_decodes, num_kv_tokens, pairs, len(plan.joins), is_first
        )


@dataclass(frozen=True, kw_only=True)
class LinearStepTimes:
    """A step-time model that is a sum of one term per feature, in picoseconds.

    step_ps: every step. decode_ps, prefill_ps, join_ps: per decode, prefill and new
    request. prefill_token_ps, kv_token_ps, context_pair_ps: see `StepFeatures`.
    """

    name: str
    step_ps: int
    prefill_token_ps: int
    decode_ps: int
    kv_token_ps: int
    prefill_ps: int = 0
    context_pair_ps: int = 0
    join_ps: int = 0

    def step_ns(self, plan: SchedulerOutput) -> int:
        """Return the time of one step."""
        features = StepFeatures.of(plan)
        time_ps = (
            self.step_ps
            + self.prefill_token_ps * features.num_prefill_tokens
            + self.prefill_ps * features.num_prefills
            + self.decode_ps * features.num_decodes
            + self.kv_token_ps * features.num_kv_tokens
            + self.context_pair_ps * features.num_context_pairs
            + self.join_ps * features.num_joins
        )
        return max(1, time_ps // _PS_PER_NS)

    def decode_times_ns(self, num_requests: int, num_kv_tokens: int, num_steps: int) -> Times:
        """Return the times of consecutive decode steps of the same requests."""
        kv_tokens = num_kv_tokens + num_requests * np.arange(num_steps, dtype=np.int64)
        kv_tokens *= self.kv_token_ps
        kv_tokens += self.step_ps + self.decode_ps * num_requests
        kv_tokens //= _PS_PER_NS
        return np.maximum(1, kv_tokens, out=kv_tokens)

    def batch_change_ns(self, after: After) -> int:
        """Return 0: the constants are means over all steps."""
        return 0

    def gap_ns(self, num_runs: int, num_prefill_tokens: int = 0) -> int:
        """Return 0, because the constants include the host's time."""
        return 0
