"""Earliest deadline first.

Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
Environment", Journal of the ACM 20(1), 1973. A deadline applies to the first token of a request.
Requests without a deadline are last, in the order of arrival. Under overload, EDF serves late
requests first.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from dovetail.interfaces import (
    CONTINUE,
    Action,
    Grant,
    Policy,
    PreemptAndAdmit,
    RequestView,
    Run,
    SchedulerView,
)


class EDFOptions(BaseModel):
    """The options. preempt: whether a request may preempt a request with a later deadline."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    retired_options: ClassVar[Mapping[str, str]] = {"displace": "preempt"}

    preempt: bool = True


class EDFPolicy(Policy):
    """Serves by (deadline, arrival). Preempts the request with the latest deadline."""

    preempts = True
    options_model: ClassVar[type[BaseModel]] = EDFOptions

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        preempt = EDFOptions.model_validate(options or {}).preempt
        self._admit = PreemptAndAdmit if preempt else Run

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[bool, int, int]:
        """Return (has no deadline, deadline, position in arrival order)."""
        return not request.deadline_ns, request.deadline_ns, request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue running requests. Admit by deadline. Preempt later deadlines if enabled."""
        yield CONTINUE
        for request in view.waiting:
            if not (yield self._admit(request)):
                return

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the running request with the latest deadline."""
        return max(running, key=lambda request: self.rank(request, view))
