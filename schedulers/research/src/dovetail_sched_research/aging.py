"""Aging for any policy: requests that have waited too long are served first, in arrival order.

The wrapper changes only the order of the inner policy, which must admit requests in the order of
the view. It is not an entry point: subclass it and set `inner_cls`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, ClassVar

from dovetail.interfaces import Action, Grant, Policy, RequestView, SchedulerView


class AgingPolicy(Policy):
    """Serves requests older than `max_wait_s` first, all other requests as `inner_cls` does.

    max_wait_s: the age limit, in seconds since the arrival.
    """

    static_rank = False
    inner_cls: ClassVar[type[Policy]] = Policy
    max_wait_s: ClassVar[float] = 30.0

    def __init__(self) -> None:
        self._inner = self.inner_cls()

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[bool, Any]:
        """Return (is young, rank of the inner policy if young, else position in arrival order)."""
        young = view.now_ns - request.arrival_ns <= self.max_wait_s * 1e9
        return young, self._inner.rank(request, view) if young else request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Yield the actions of the inner policy, which sees the waiting requests in this order."""
        yield from self._inner.plan(view)

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the victim of the inner policy."""
        return self._inner.victim(running, view)

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Notify the inner policy."""
        self._inner.on_arrival(request, view)

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Notify the inner policy."""
        self._inner.on_granted(request, num_tokens, view)

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Notify the inner policy."""
        self._inner.on_output(request, num_tokens, view)

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        """Notify the inner policy."""
        self._inner.on_evict(request, num_tokens_lost, view)

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Notify the inner policy."""
        self._inner.on_finish(request, view)
