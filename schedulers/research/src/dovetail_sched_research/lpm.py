"""Longest prefix match: who finds most of its prompt in the prefix cache is served next.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS
2024, arXiv:2312.07104. Requests of one prefix run one after the other, while it is cached; those of
a rare prefix may wait for ever, unless `max_wait_s` bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import Policy, RequestView, SchedulerView


class LPMOptions(BaseModel):
    """The options. max_wait_s: who has waited longer goes first, by arrival, cached or not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_wait_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)


class LPMPolicy(Policy):
    """Serve by (cached tokens, the most first; arrival), the over-aged before all."""

    static_rank = False
    options_model: ClassVar[type[BaseModel]] = LPMOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._max_wait_ns = round(LPMOptions.model_validate(options or {}).max_wait_s * 1e9)

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[bool, int, int]:
        """Return (whether it is young, -cached tokens if it is, place in the order of arrival)."""
        if view.now_ns - request.arrival_ns > self._max_wait_ns:
            return False, 0, request.sequence
        return True, -view.num_cached_tokens(request), request.sequence
