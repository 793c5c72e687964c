"""On time: serve the largest set of prompts that can meet their deadlines, in short steps.

Source: this project. The order is that of Moore and Hodgson (Moore, "An n Job, One Machine
Sequencing Algorithm for Minimizing the Number of Late Jobs", Management Science 15(1), 1968),
computed again in every step. A step is limited as in Sarathi, but in time, which the policy learns.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Generator, Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, RequestView, Run, SchedulerView
from dovetail_sched_research.step_estimate import StepEstimate


class OnTimeOptions(BaseModel):
    """The options.

    step_ms: maximum duration of a step while requests decode; choose 0.9 times the objective for
    the time per output token. ttft_ms: deadline, counted from arrival, of requests without a
    deadline.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_ms: float = Field(default=30.0, gt=0, le=1e6)
    ttft_ms: float = Field(default=1000.0, gt=0, le=1e9)


class OnTimePolicy(Policy):
    """Runs all decodes, then prefills that can meet their deadlines by deadline, then late ones."""

    static_rank = False
    work_conserving = False
    options_model: ClassVar[type[BaseModel]] = OnTimeOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        values = OnTimeOptions.model_validate(options or {})
        self._step_ns, self._ttft_ns = values.step_ms * 1e6, int(values.ttft_ms * 1e6)
        self._estimate = StepEstimate()

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Run every decode, then fill the rest of the step with prefill tokens."""
        running = view.running
        self._estimate.learn(running, view.now_ns)
        prompts = [item for item in running if view.num_uncomputed_tokens(item) > 1]
        started = {item.sequence for item in prompts}
        decodes = [item for item in running if item.sequence not in started]
        for item in decodes if prompts else ():
            yield Run(item)  # CONTINUE would also run the rest of started prompts
        if not prompts:
            yield CONTINUE
        served = {item.sequence for item in decodes}
        left = chunk = view.tokens_left
        if decodes and self._estimate.token_ns:
            left = chunk = min(chunk, self._estimate.max_prompt_tokens(self._step_ns))
        for request in self._order([*prompts, *view.waiting], chunk, view):
            if left <= 0:
                break
            grant = yield Run(request, left)
            if not grant and not served:
                grant = yield Run(request)  # without chunked prefill, the prompt runs alone
            if not grant and request.sequence not in started:
                break  # keeps the order among the waiting requests
            left -= grant.num_tokens
            served.add(request.sequence)
        self._estimate.begin(view.now_ns, chunk - left, served)

    def _order(
        self, prompts: Collection[RequestView], chunk: int, view: SchedulerView
    ) -> list[RequestView]:
        """Return the prompts that can be on time, by deadline, then the others, by arrival.

        Prompts are added by deadline. If not all added prompts can meet their deadlines, the one
        with the most work becomes late.
        """
        token_ns = self._estimate.token_ns + self._estimate.decode_ns / max(1, chunk)
        end_ns, on_time, late = float(view.now_ns), [], set()
        by_deadline = sorted(prompts, key=lambda item: (self._deadline_ns(item), item.sequence))
        for item in by_deadline:
            work_ns = token_ns * view.num_uncomputed_tokens(item)
            heapq.heappush(on_time, (-work_ns, item.sequence))
            end_ns += work_ns
            if end_ns > self._deadline_ns(item):
                negative_ns, sequence = heapq.heappop(on_time)
                end_ns += negative_ns
                late.add(sequence)
        last = sorted((item.sequence, item) for item in prompts if item.sequence in late)
        return [item for item in by_deadline if item.sequence not in late] + [
            item for _, item in last
        ]

    def _deadline_ns(self, request: RequestView) -> int:
        return request.deadline_ns or request.arrival_ns + self._ttft_ns
