"""Aging, around any policy: who has waited too long goes first, in the order of arrival.

Composition by wrapping: the order is changed, everything else is the inner policy's. It works for
whatever admits in the order of the view. Not an entry point: subclass it and name the inner one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, ClassVar

from dovetail.interfaces import Action, Grant, Policy, RequestView, SchedulerView


class AgingPolicy(Policy):
    """Serve as the policy of `inner_cls`, but nobody younger before one that is over age.

    max_wait_s: the age, in seconds since the arrival.
    """

    static_rank = False
    inner_cls: ClassVar[type[Policy]] = Policy
    max_wait_s: ClassVar[float] = 30.0

    def __init__(self) -> None:
        self._inner = self.inner_cls()

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[bool, Any]:
        """Return (whether it is young, arrival or the inner rank)."""
        young = view.now_ns - request.arrival_ns <= self.max_wait_s * 1e9
        return young, self._inner.rank(request, view) if young else request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Wish what the inner policy actions, who sees those that wait in this order."""
        yield from self._inner.plan(view)

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the inner policy's."""
        return self._inner.victim(running, view)

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Tell the inner policy."""
        self._inner.on_arrival(request, view)

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Tell the inner policy."""
        self._inner.on_granted(request, num_tokens, view)

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Tell the inner policy."""
        self._inner.on_output(request, num_tokens, view)

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        """Tell the inner policy."""
        self._inner.on_evict(request, num_tokens_lost, view)

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Tell the inner policy."""
        self._inner.on_finish(request, view)
