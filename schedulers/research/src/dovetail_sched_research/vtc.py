"""Virtual token counter: tenants get equal service, and idle time gives a tenant no advantage.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv:2401.00588. Each
tenant has a counter of its service: weighted tokens divided by the tenant's weight. The tenant with
the lowest counter is served next. When an idle tenant returns, its counter is raised to the lowest
counter of the others. Of many idle tenants, those with the lowest counters are forgotten.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, RequestView, Run, SchedulerView
from dovetail_sched_research.tenants import forget_idle


class VTCOptions(BaseModel):
    """The options.

    prompt_weight, output_weight: cost of a token. weights: of tenants by name, 1 by default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    output_weight: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}


class VTCPolicy(Policy):
    """Admits requests of the tenant with the lowest counter first, in the order of arrival."""

    static_rank = False
    options_model: ClassVar[type[BaseModel]] = VTCOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._options = VTCOptions.model_validate(options or {})
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._waiting: dict[str, set[int]] = {}
        self._last_served = ""

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[float, int]:
        """Return (the tenant's counter, position in arrival order)."""
        return self._counters[request.tenant], request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue running requests. Admit by lowest counter until one request is denied."""
        yield CONTINUE
        queues: dict[str, deque[RequestView]] = {}
        for request in view.waiting if view.seats_left else ():
            queues.setdefault(request.tenant, deque()).append(request)
        while queues:
            tenant = min(queues, key=lambda name: self.rank(queues[name][0], view))
            request = queues[tenant].popleft()
            if not (grant := (yield Run(request))):
                return
            if grant.num_tokens or grant.num_cached:  # a denied request stays in the queue
                self._leave(request)
                self._last_served = tenant
                if not request.num_preemptions:  # recomputed tokens are not charged
                    self._charge(tenant, self._options.prompt_weight * request.num_prompt_tokens)
            if not queues[tenant]:
                del queues[tenant]

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the latest request to arrive from the tenant with the highest counter."""
        return max(running, key=lambda request: self.rank(request, view))

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Raise a returning tenant's counter to the lowest counter of the other tenants."""
        tenant, counters = request.tenant, self._counters
        if tenant not in self._waiting:
            others = list(self._waiting) or [self._last_served]
            counters[tenant] = max(counters[tenant], min(counters[name] for name in others))
            forget_idle(counters, self._waiting.keys() | {tenant}, gain=lambda counter: counter)
        self._waiting.setdefault(tenant, set()).add(request.sequence)

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Add the cost of output tokens to the tenant's counter."""
        self._charge(request.tenant, self._options.output_weight * num_tokens)

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        """Record that the request waits again. The counter of its tenant does not change."""
        self._waiting.setdefault(request.tenant, set()).add(request.sequence)

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Remove a request that may have ended while it waited."""
        self._leave(request)

    def _leave(self, request: RequestView) -> None:
        waiting = self._waiting.get(request.tenant, set())
        waiting.discard(request.sequence)
        if not waiting:
            self._waiting.pop(request.tenant, None)

    def _charge(self, tenant: str, service: float) -> None:
        self._counters[tenant] += service / self._options.weights.get(tenant, 1.0)
