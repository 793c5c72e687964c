"""Shortest remaining processing time: shortest job first with preemption of long requests.

Source: Schrage, "A Proof of the Optimality of the Shortest Remaining Processing Time Discipline",
Operations Research 16(3), 1968. The mean latency is optimal if preemption is free. Here the victim
loses its cache, so a request must be shorter by the factor `hysteresis` to preempt another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import RequestView, SchedulerView
from dovetail_sched_research.one_order import OneOrderPolicy
from dovetail_sched_research.predictors import PredictorName, make_predictor


class SRPTOptions(BaseModel):
    """The options.

    predictor: oracle, noisy:SIGMA, bucketed:BASE or constant:N. hysteresis: a waiting request
    preempts a running request that has more than `hysteresis` times as much work left.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    predictor: PredictorName = "oracle"
    hysteresis: float = Field(default=2.0, ge=1, allow_inf_nan=False)


class SRPTPolicy(OneOrderPolicy):
    """Serves running and waiting requests by expected remaining output tokens."""

    options_model: ClassVar[type[BaseModel]] = SRPTOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._options = SRPTOptions.model_validate(options or {})
        self._predict = make_predictor(self._options.predictor)

    def rank(self, request: RequestView, view: SchedulerView) -> float:
        """Return the expected remaining output tokens, at least 1."""
        return max(1.0, self._predict(request) - request.num_output_tokens)

    def may_preempt(self, request: RequestView, running: RequestView, view: SchedulerView) -> bool:
        """Return whether `running` has over `hysteresis` times as much work left as `request`."""
        return self.rank(running, view) > self._options.hysteresis * self.rank(request, view)
