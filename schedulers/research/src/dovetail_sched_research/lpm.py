"""Longest prefix match: the request with the most cached prompt tokens is served next.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS
2024, arXiv:2312.07104. Requests with the same prefix run consecutively while it is cached.
`max_wait_s` bounds the wait of requests with a rare prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import Policy, RequestView, SchedulerView


class LPMOptions(BaseModel):
    """The options. max_wait_s: requests that have waited longer are served first, by arrival."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_wait_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)


class LPMPolicy(Policy):
    """Serves requests older than `max_wait_s` first, then by (most cached tokens, arrival)."""

    static_rank = False
    options_model: ClassVar[type[BaseModel]] = LPMOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._max_wait_ns = round(LPMOptions.model_validate(options or {}).max_wait_s * 1e9)

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[bool, int, int]:
        """Return (is young, -cached tokens if young, position in arrival order)."""
        if view.now_ns - request.arrival_ns > self._max_wait_ns:
            return False, 0, request.sequence
        return True, -view.num_cached_tokens(request), request.sequence
