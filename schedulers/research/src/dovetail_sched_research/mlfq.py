"""Skip-join multi-level feedback queue: short jobs pass long ones without knowing which is which.

Source: Wu et al., "FastServe: Iteration-Level Preemptive Scheduling for Large Language Model
Inference", NSDI 2026, arXiv:2305.05920. A request joins at the level whose quantum its prompt fits,
sinks a level when it has used a quantum up, and rises to the top when nobody serves it for long. It
pauses in place, with its blocks; the paper swaps them out, here `preempt` computes them again.
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

    max_batch: requests that compute in a step. levels, quantum, ratio: level i lasts
    quantum · ratio^i iterations. prompt_tokens: count as one. promote_s: a request that was not
    served for so long rises to the top. preempt: whether a better request may evict a paused one.
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
    """Where a request stands: its level, the iterations it had there, and when it was served."""

    level: int
    used: int
    served_ns: int


class MLFQPolicy(OneOrderPolicy):
    """Serve by (level, arrival), up to `max_batch` at a time; the others are paused."""

    work_conserving = False
    options_model: ClassVar[type[BaseModel]] = MLFQOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._options = given = MLFQOptions.model_validate(options or {})
        self._quanta = [given.quantum * given.ratio**level for level in range(given.levels)]
        self._places: dict[int, _Place] = {}
        self.max_batch = given.max_batch

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[int, int]:
        """Return (level, arrival). Who has lost its work often stays on top, or would never end."""
        on_top = request.num_preemptions > self._options.levels
        return 0 if on_top else self._places[request.sequence].level, request.sequence

    def may_preempt(self, request: RequestView, running: RequestView, view: SchedulerView) -> bool:
        """Return whether the running one is on a lower level, if any may be preempted."""
        return self._options.preempt and self.rank(request, view)[0] < self.rank(running, view)[0]

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Promote who starved, serve the best, and pause the others in place."""
        for place in self._places.values():
            if view.now_ns - place.served_ns > self._options.promote_s * 1e9:
                place.level, place.used, place.served_ns = 0, 0, view.now_ns
        served = yield from self.serve(view)
        for request in view.running:
            if request.sequence not in served:
                yield Hold(request)

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Join at the first level whose quantum the prompt fits."""
        cost = self._cost(request.num_prompt_tokens)
        level = sum(quantum < cost for quantum in self._quanta[:-1])
        self._places[request.sequence] = _Place(level, 0, view.now_ns)

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Book the iterations; sink a level when the quantum is used up."""
        place = self._places[request.sequence]
        place.served_ns = view.now_ns
        place.used += self._cost(num_tokens)
        if place.used >= self._quanta[place.level] and place.level < len(self._quanta) - 1:
            place.level, place.used = place.level + 1, 0

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Forget it."""
        del self._places[request.sequence]

    def _cost(self, num_tokens: int) -> int:
        return max(1, num_tokens // self._options.prompt_tokens)
