"""The margin rule, which decides whether two computations of the same sequence agree.

Teacher-forced logits agree within `TOLERANCE` at every position. Tokens agree wherever the
reference's top-two gap exceeds ten times `TOLERANCE`. At least `MIN_SHARE` of the positions have
such a gap. The rule depends only on sequences, logits and tokens, not on their source.

A sequence is compared up to the first position at which rounding errors decide which experts a
token gets (`router_gaps`). At most `MAX_EXCLUDED` of the positions may be excluded.

Dimensions: N recorded tokens of a request, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dovetail.engine.input.input_processor import user_request_id
from parity.recording import RecordedRun
from parity.router_gaps import Gaps, first_tie

TOLERANCE = 1e-4
MARGIN = 10 * TOLERANCE
MIN_SHARE = 0.95
MAX_EXCLUDED = 0.05

Oracle = Callable[[Sequence[int]], torch.Tensor]
"""Maps token ids to the reference logits after each of them, [T, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequenced:
    """The tokens of a finished request, with counts of its parts.

    num_cached: prompt tokens from the prefix cache, which were not computed. greedy: whether each
    generated token must be the most likely one.
    """

    token_ids: tuple[int, ...]
    num_prompt: int
    num_cached: int
    greedy: bool


@dataclass(slots=True, kw_only=True)
class Agreement:
    """Counts over all requests of a run.

    positions: compared logit vectors; a recomputed position counts again. excluded: logit vectors
    at or after a tie of a router, which must only be finite. draws: number of runs, each with other
    prompts, of which this is the last. missing: positions without a computed logit vector.
    max_error: largest absolute difference of a logit. qualifying: positions whose gap exceeds the
    margin; qualifying_equal: qualifying positions with the same most likely token in both. tokens:
    generated tokens of greedy requests. tokens_qualifying: tokens after a qualifying position.
    tokens_equal: tokens after a qualifying position that are the most likely token of the
    reference.
    """

    positions: int = 0
    excluded: int = 0
    draws: int = 1
    missing: int = 0
    max_error: float = 0.0
    qualifying: int = 0
    qualifying_equal: int = 0
    tokens: int = 0
    tokens_qualifying: int = 0
    tokens_equal: int = 0

    @property
    def is_covered(self) -> bool:
        """Whether few enough positions are excluded."""
        return self.excluded <= MAX_EXCLUDED * (self.positions + self.excluded)

    def check(self) -> None:
        """Raise AssertionError, with the counts, unless the margin rule holds."""
        assert self.positions and self.tokens, f"nothing was compared: {self}"
        self.check_compared()
        assert self.is_covered, f"too many positions are excluded: {self}"
        assert self.qualifying >= MIN_SHARE * self.positions, f"too few positions qualify: {self}"
        assert self.tokens_qualifying >= MIN_SHARE * self.tokens, f"too few tokens qualify: {self}"

    def check_compared(self) -> None:
        """Raise AssertionError, with the counts, if a compared logit or token differs."""
        assert not self.missing, f"positions were never computed: {self}"
        assert self.max_error <= TOLERANCE, f"logits differ: {self}"
        assert self.qualifying_equal == self.qualifying, f"the most likely tokens differ: {self}"
        assert self.tokens_equal == self.tokens_qualifying, f"tokens differ: {self}"


def measure(
    requests: Mapping[str, Sequenced],
    recorded: Iterable[RecordedRun],
    oracle: Oracle,
    gaps: Gaps | None = None,
) -> Agreement:
    """Compare recorded logits and greedy tokens with the reference.

    gaps: the gaps of the reference's routers. Without them, no position is excluded.
    """
    agreement = Agreement()
    ends = {
        name: first_tie(gaps(request.token_ids)) if gaps else len(request.token_ids)
        for name, request in requests.items()
    }
    computed = {name: [False] * len(r.token_ids) for name, r in requests.items()}
    for run in recorded:
        name = user_request_id(run.request_id)
        request = requests[name]
        end = run.start + len(run.logits)
        computed[name][run.start : end] = [True] * len(run.logits)
        num_compared = min(max(ends[name] - run.start, 0), len(run.logits))
        agreement.excluded += len(run.logits) - num_compared
        if not run.logits.isfinite().all():
            agreement.max_error = float("inf")
        if num_compared:
            reference_NV = oracle(request.token_ids)[run.start : run.start + num_compared]
            _compare_logits(agreement, run.logits[:num_compared], reference_NV)
    for name, request in requests.items():
        # No logits are computed for the last token, because no token follows it.
        agreement.missing += computed[name][request.num_cached : -1].count(False)
        if request.greedy:
            _compare_tokens(agreement, request, oracle(request.token_ids)[: ends[name]])
    return agreement


def _compare_logits(
    agreement: Agreement, ours_NV: torch.Tensor, reference_NV: torch.Tensor
) -> None:
    agreement.positions += len(ours_NV)
    # amax keeps NaN, and NaN counts as a difference.
    error = (ours_NV - reference_NV).abs().amax().item()
    agreement.max_error = max(agreement.max_error, error if error == error else float("inf"))
    best_N, clear_N = _best(reference_NV)
    agreement.qualifying += int(clear_N.sum())
    agreement.qualifying_equal += int((clear_N & (ours_NV.argmax(-1) == best_N)).sum())


def _compare_tokens(agreement: Agreement, request: Sequenced, reference_TV: torch.Tensor) -> None:
    end = min(len(reference_TV), len(request.token_ids) - 1)
    if end < request.num_prompt:
        return  # no token follows a compared position
    tokens_N = torch.tensor(request.token_ids[request.num_prompt : end + 1])
    best_N, clear_N = _best(reference_TV[request.num_prompt - 1 : end])
    agreement.tokens += len(tokens_N)
    agreement.tokens_qualifying += int(clear_N.sum())
    agreement.tokens_equal += int((clear_N & (tokens_N == best_N)).sum())


def _best(reference_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely token of each position, and whether its gap exceeds the margin."""
    top_N2 = reference_NV.topk(2)
    return top_N2.indices[:, 0], top_N2.values[:, 0] - top_N2.values[:, 1] > MARGIN
