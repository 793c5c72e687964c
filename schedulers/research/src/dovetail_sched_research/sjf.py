"""Shortest job first: the request with the fewest expected output tokens is served next.

Source: Smith, "Various optimizers for single-stage production", 1956, for the rule; Fu et al.,
"Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024, arXiv:2408.15792, for outputs of
language models. It does not preempt. Long requests wait while short requests arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from dovetail.interfaces import Policy, RequestView, SchedulerView
from dovetail_sched_research.predictors import PredictorName, make_predictor


class SJFOptions(BaseModel):
    """The options. predictor: oracle, noisy:SIGMA, bucketed:BASE or constant:N."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    predictor: PredictorName = "oracle"


class SJFPolicy(Policy):
    """Serves by (expected output tokens, arrival)."""

    options_model: ClassVar[type[BaseModel]] = SJFOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._predict = make_predictor(SJFOptions.model_validate(options or {}).predictor)

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[float, int]:
        """Return (expected output tokens, position in arrival order)."""
        return self._predict(request), request.sequence
