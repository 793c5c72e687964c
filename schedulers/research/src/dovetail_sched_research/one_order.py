"""One order for those that run and those that wait: the plan of preemptive policies.

Merges both by `rank` and serves the best, up to a batch. Whoever is not served keeps its row and
blocks. Depends on no order and no reason to preempt anybody: subclasses bring them.
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
    """Serve running and waiting requests in one order; the worst that runs gives way.

    max_batch: how many may compute in a step.
    """

    static_rank = False
    preempts = True
    max_batch: float = float("inf")

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a subclass that defines a hook by its old name."""
        if "may_displace" in vars(cls):
            raise TypeError(f"{cls.__name__}.may_displace was renamed; define may_preempt.")

    def may_preempt(self, request: RequestView, running: RequestView, view: SchedulerView) -> bool:
        """Return whether a waiting request is so much better than the worst that runs."""
        return bool(self.rank(running, view) > self.rank(request, view))

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Serve the best `max_batch` of all; admit until one is denied."""
        yield from self.serve(view)

    def serve(self, view: SchedulerView) -> Generator[Action, Grant, set[int]]:
        """Do what `plan` says, and return the sequence numbers of those that were served."""
        running = {request.sequence for request in view.running}
        waiting = {request.sequence for request in view.waiting}
        served: set[int] = set()
        everyone = [*view.running, *view.waiting]
        for request in sorted(everyone, key=lambda one: (self.rank(one, view), one.sequence)):
            if len(served) >= self.max_batch:
                break
            if request.sequence in running:
                granted = bool((yield Run(request)))
            elif request.sequence in waiting:
                granted = yield from self._admit(request, view)
                waiting = waiting if granted else set()
                running &= {one.sequence for one in view.running}  # some may have given way
            else:
                continue  # it gave way in this step
            if granted:
                served.add(request.sequence)
        return served

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the running request of the worst rank."""
        return max(running, key=lambda one: (self.rank(one, view), one.sequence))

    def _admit(self, request: RequestView, view: SchedulerView) -> Generator[Action, Grant, bool]:
        grant = yield Run(request)
        if grant.denied in (Denied.SEATS, Denied.BLOCKS) and view.running:
            worst = self.victim(view.running, view)
            if self.may_preempt(request, worst, view):
                grant = yield PreemptAndAdmit(request)
        return bool(grant)
