"""Highest response ratio next: short requests first, until a long request has waited long enough.

Source: Brinch Hansen, "Short-Term Scheduling in Multiprogramming Systems", SOSP 1971. The response
ratio is (wait + work) / work. It grows faster for short requests, but it grows for all requests, so
no request waits forever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import Policy, RequestView, SchedulerView
from dovetail_sched_research.predictors import PredictorName, make_predictor


class HRRNOptions(BaseModel):
    """The options.

    predictor: oracle, noisy:SIGMA, bucketed:BASE or constant:N. prompt_weight: work of an uncached
    prompt token, relative to an output token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    predictor: PredictorName = "oracle"
    prompt_weight: float = Field(default=0.05, ge=0, allow_inf_nan=False)


class HRRNPolicy(Policy):
    """Serves the request with the highest ratio of waiting time to work first."""

    static_rank = False
    options_model: ClassVar[type[BaseModel]] = HRRNOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._options = HRRNOptions.model_validate(options or {})
        self._predict = make_predictor(self._options.predictor)

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[float, int]:
        """Return (-wait / work, arrival), which orders by descending response ratio."""
        wait_ns = view.now_ns - request.arrival_ns
        return -wait_ns / self._work(request, view), request.sequence

    def _work(self, request: RequestView, view: SchedulerView) -> float:
        uncached = request.num_prompt_tokens - view.num_cached_tokens(request)
        return self._predict(request) + self._options.prompt_weight * max(0, uncached)
