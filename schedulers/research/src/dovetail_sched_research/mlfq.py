"""Skip-join multi-level feedback queue: short requests overtake long requests without prediction.

Source: Wu et al., "FastServe: Iteration-Level Preemptive Scheduling for Large Language Model
Inference", NSDI 2026, arXiv:2305.05920. A request starts on the first level with a quantum that
fits its prompt, moves down a level after each quantum, and moves to the top if it is not served for
`promote_s`. A paused request keeps its blocks; the paper swaps them out, `preempt` drops them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import Action, Grant, Hold, RequestView, SchedulerView
from dovetail_sched_research.one_order import OneOrderPolicy


class MLFQOptions(BaseModel):
    """The options.

    max_batch: number of requests in a step. levels, quantum, ratio: level i lasts quantum · ratio^i
    iterations. prompt_tokens: prompt tokens that count as one iteration. promote_s: seconds without
    service after which a request rises to the top. preempt: whether paused requests may be evicted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    retired_options: ClassVar[Mapping[str, str]] = {"displace": "preempt"}

    max_batch: int = Field(default=32, ge=1)
    levels: int = Field(default=6, ge=1)
    quantum: int = Field(default=8, ge=1)
    ratio: int = Field(default=2, ge=2)
    prompt_tokens: int = Field(default=64, ge=1)
    promote_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    preempt: bool = False


@dataclass(slots=True)
class _Place:
    """The level of a request, its iterations on that level, and when it was last served."""

    level: int
    used: int
    served_ns: int


class MLFQPolicy(OneOrderPolicy):
    """Serves up to `max_batch` requests by (level, arrival). Pauses the other requests."""

    work_conserving = False
    options_model: ClassVar[type[BaseModel]] = MLFQOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._options = parsed = MLFQOptions.model_validate(options or {})
        self._quanta = [parsed.quantum * parsed.ratio**level for level in range(parsed.levels)]
        self._places: dict[int, _Place] = {}
        self.max_batch = parsed.max_batch

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[int, int]:
        """Return (level, arrival). A request preempted too often stays on the top level."""
        on_top = request.num_preemptions > self._options.levels
        return 0 if on_top else self._places[request.sequence].level, request.sequence

    def may_preempt(self, request: RequestView, running: RequestView, view: SchedulerView) -> bool:
        """Return whether preemption is enabled and `running` is on a lower level."""
        return self._options.preempt and self.rank(request, view)[0] < self.rank(running, view)[0]

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Promote starved requests, serve the first requests in the order, and pause the others."""
        for position in self._places.values():
            if view.now_ns - position.served_ns > self._options.promote_s * 1e9:
                position.level, position.used, position.served_ns = 0, 0, view.now_ns
        served = yield from self.serve(view)
        for request in view.running:
            if request.sequence not in served:
                yield Hold(request)

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Put the request on the first level with a quantum that is large enough for its prompt."""
        cost = self._cost(request.num_prompt_tokens)
        level = sum(quantum < cost for quantum in self._quanta[:-1])
        self._places[request.sequence] = _Place(level, 0, view.now_ns)

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Count the iterations. Move the request one level down when its quantum is used up."""
        position = self._places[request.sequence]
        position.served_ns = view.now_ns
        position.used += self._cost(num_tokens)
        if position.used >= self._quanta[position.level] and position.level < len(self._quanta) - 1:
            position.level, position.used = position.level + 1, 0

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Remove the request."""
        del self._places[request.sequence]

    def _cost(self, num_tokens: int) -> int:
        return max(1, num_tokens // self._options.prompt_tokens)
