"""Deficit longest prefix match: longest cached prefix first, among the tenants with credit.

Source: Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025, arXiv:2501.14312. As in
deficit round robin, the computed tokens of a tenant reduce its credit; when no waiting tenant
has credit, each tenant gets another quantum of credit. A large quantum favors cache hits, a small
quantum favors fairness. Of many idle tenants, those with the most credit are forgotten.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, RequestView, Run, SchedulerView
from dovetail_sched_research.tenants import MAX_IDLE_TENANTS, forget_idle


class DLPMOptions(BaseModel):
    """The options.

    quantum: credit that a tenant gets at a time, in weighted tokens; at least 1. output_weight:
    cost of an output token relative to a prompt token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    quantum: float = Field(default=4096.0, ge=1, allow_inf_nan=False)
    output_weight: float = Field(default=2.0, ge=0, allow_inf_nan=False)


class DLPMPolicy(Policy):
    """Admits the request with the longest cached prefix among the tenants that have credit."""

    static_rank = False
    options_model: ClassVar[type[BaseModel]] = DLPMOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._options = DLPMOptions.model_validate(options or {})
        self._credits: defaultdict[str, float] = defaultdict(float)

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[int, int, int]:
        """Return (number of quanta until the tenant has credit, -cached tokens, arrival)."""
        return self._refills(request.tenant), -view.num_cached_tokens(request), request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue running requests. Admit requests with credit until one request is denied."""
        yield CONTINUE
        waiting = list(view.waiting) if view.seats_left else []
        if waiting and len(self._credits) > MAX_IDLE_TENANTS:
            active = {request.tenant for request in (*waiting, *view.running)}
            forget_idle(self._credits, active, gain=lambda credit: -credit)
        while waiting:
            best = next((item for item in waiting if self._credits[item.tenant] > 0), None)
            if best is None:
                self._refill(waiting)
                continue
            grant = yield Run(best)
            if not grant:
                return
            waiting.remove(best)
            is_admitted = (
                grant.num_tokens or grant.num_cached
            )  # a denied request stays in the queue
            if is_admitted and not best.num_preemptions:  # recomputed tokens are not charged
                self._credits[best.tenant] -= best.num_prompt_tokens - grant.num_cached

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Subtract the cost of output tokens from the tenant's credit."""
        self._credits[request.tenant] -= self._options.output_weight * num_tokens

    def _refill(self, waiting: list[RequestView]) -> None:
        """Add quanta to all waiting tenants until the first of them has credit."""
        tenants = {request.tenant for request in waiting}
        credit = min(map(self._refills, tenants)) * self._options.quantum
        for tenant in tenants:
            self._credits[tenant] += credit

    def _refills(self, tenant: str) -> int:
        """Return the number of quanta until the tenant has credit."""
        return max(0, 1 + math.floor(-self._credits[tenant] / self._options.quantum))
