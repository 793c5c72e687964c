"""Checks that plans and the counts of `depth()` respect pauses and admission gates.

This module uses only request ids and plans. It does not check the order of runnable requests.
"""

from __future__ import annotations

from collections.abc import Collection

from dovetail.interfaces.scheduler import Depth, PauseScope
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest
from dovetail_devkit.expectation import expect
from dovetail_devkit.scheduler.gate import FakeGate


def waits_at_the_gate(request: EngineCoreRequest) -> bool:
    """Return whether the test's admission gate holds `request`. It holds two of five requests."""
    return request.seed % 5 < 2


class HoldChecker:
    """Checks that held and paused requests are not scheduled. scope: the scope of the pause."""

    def __init__(self, *, connected: bool = False) -> None:
        """connected: whether a request may be admitted for a KV load without tokens in a plan."""
        self._connected = connected
        self.gate = FakeGate(waits_at_the_gate)
        self.scope: PauseScope | None = None
        self._begun: set[str] = set()

    def add(self, request_id: str) -> None:
        """Record a new request. The id of an ended request may be reused."""
        self._begun.discard(request_id)

    def may_run(self, alive: Collection[str]) -> set[str]:
        """Return the requests of `alive` that the next plan may run."""
        if self.scope is PauseScope.ALL:
            return set()
        free = set(alive) - set(self.gate.held)
        return free & self._begun if self.scope is PauseScope.NEW else free

    def planned(self, plan: SchedulerOutput, alive: Collection[str]) -> None:
        """Check a new plan against pauses and gates."""
        free = self.may_run(alive)
        for request in plan.joins:
            name = request.request_id
            unseen = self._connected and self.scope is PauseScope.NEW
            expect(
                name in free or unseen,
                f"the plan admits {name}, although an admission gate or a pause holds this request "
                f"(pause: {self.scope})",
            )
            self._begun.add(name)
        paused = self.scope is PauseScope.ALL
        expect(plan.empty or not paused, "the plan has runs, although all requests are paused")

    def check_depth(self, depth: Depth, num_alive: int) -> None:
        """Check that depth() counts the paused requests."""
        low, high = {
            None: (0, 0),
            PauseScope.NEW: (0, depth.num_waiting),
            PauseScope.ALL: (num_alive, num_alive),
        }[self.scope]
        expect(
            low <= depth.num_paused <= high,
            f"depth() returns num_paused={depth.num_paused} while the pause is {self.scope}; "
            f"expected {low} to {high}",
        )
