"""One order for running and waiting requests: the base class of preemptive policies.

Sorts both by `rank` and serves the first `max_batch`. A running request that is not served keeps
its batch slot and blocks. Subclasses define the rank and when to preempt.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from dovetail.interfaces import (
    Action,
    Denied,
    Grant,
    Policy,
    PreemptAndAdmit,
    RequestView,
    Run,
    SchedulerView,
)


class OneOrderPolicy(Policy):
    """Serves running and waiting requests in one order. Preempts the last running request.

    max_batch: the maximum number of requests in a step.
    """

    static_rank = False
    preempts = True
    max_batch: float = float("inf")

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a subclass that defines a hook with its old name."""
        if "may_displace" in vars(cls):
            raise TypeError(f"{cls.__name__}.may_displace was renamed; define may_preempt.")

    def may_preempt(self, request: RequestView, running: RequestView, view: SchedulerView) -> bool:
        """Return whether a waiting request may preempt the last running request in the order."""
        return bool(self.rank(running, view) > self.rank(request, view))

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Serve the first `max_batch` requests of the order. Admit until a request is denied."""
        yield from self.serve(view)

    def serve(self, view: SchedulerView) -> Generator[Action, Grant, set[int]]:
        """Yield the actions of `plan`, and return the sequence numbers of the served requests."""
        running = {request.sequence for request in view.running}
        waiting = {request.sequence for request in view.waiting}
        served: set[int] = set()
        everyone = [*view.running, *view.waiting]
        for request in sorted(everyone, key=lambda item: (self.rank(item, view), item.sequence)):
            if len(served) >= self.max_batch:
                break
            if request.sequence in running:
                granted = bool((yield Run(request)))
            elif request.sequence in waiting:
                granted = yield from self._admit(request, view)
                waiting = waiting if granted else set()
                running &= {
                    item.sequence for item in view.running
                }  # the request may have been preempted
            else:
                continue  # preempted in this step
            if granted:
                served.add(request.sequence)
        return served

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the running request with the highest rank."""
        return max(running, key=lambda item: (self.rank(item, view), item.sequence))

    def _admit(self, request: RequestView, view: SchedulerView) -> Generator[Action, Grant, bool]:
        grant = yield Run(request)
        if grant.denied in (Denied.SEATS, Denied.BLOCKS) and view.running:
            worst = self.victim(view.running, view)
            if self.may_preempt(request, worst, view):
                grant = yield PreemptAndAdmit(request)
        return bool(grant)
