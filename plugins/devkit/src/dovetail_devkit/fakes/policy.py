"""A fake policy that serves the longest prompt first and records every hook call."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.policy import Policy, RequestView, SchedulerView


class FakePolicy(Policy):
    """Serves the longest prompt first, then by arrival, and preempts the shortest prompt.

    calls: (hook, request id) of every hook so far, in order.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def rank(self, request: RequestView, view: SchedulerView) -> int:
        """Return a smaller rank for a longer prompt."""
        return -request.num_prompt_tokens

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the request with the shortest prompt. Among equal prompts, take the newest."""
        return min(running, key=lambda item: (item.num_prompt_tokens, -item.sequence))

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Record the call to `on_arrival`."""
        self.calls.append(("on_arrival", request.request_id))

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Record the call to `on_granted`."""
        self.calls.append(("on_granted", request.request_id))

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Record the call to `on_output`."""
        self.calls.append(("on_output", request.request_id))

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        """Record the call to `on_evict`."""
        self.calls.append(("on_evict", request.request_id))

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Record the call to `on_finish`."""
        self.calls.append(("on_finish", request.request_id))


class AgingPolicy(Policy):
    """A policy whose ranks change over time: waiting improves the rank of a request."""

    static_rank = False
    preempts = True

    def rank(self, request: RequestView, view: SchedulerView) -> int:
        """Return priority · 10 ms minus the age of the request, in nanoseconds."""
        return request.priority * 10_000_000 - (view.now_ns - request.arrival_ns)

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the running request with the worst rank."""
        return max(running, key=lambda request: self.rank(request, view))
