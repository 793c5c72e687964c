"""The contract of a gate: what a new request has to wait for before it may be scheduled.

A grammar that is being compiled, an adapter that is being loaded: work that somebody else does
elsewhere, in threads of its own. The scheduler asks its gates once for each new request and then,
at every step, who is ready; it never waits, and requests behind pass by. A request that was
preempted does not come through again. Calls come from the scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dovetail.request import EngineCoreRequest, RequestStatus


class AdmissionGate(Protocol):
    """Holds some new requests back until what they need is there. No call may block."""

    @property
    def status(self) -> RequestStatus:
        """What a held request is said to wait for, such as WAITING_FOR_FSM."""

    def holds(self, request: EngineCoreRequest) -> bool:
        """Return whether `request`, which is new, has to wait; if so, begin what it waits for.

        Each held request is later named once, by `take_ready` or `take_failed`, unless it is
        forgotten first. A RequestError refuses the request.
        """

    def take_ready(self) -> Sequence[str]:
        """Return the ids of held requests that may pass, since the last call; in any order."""

    def take_failed(self) -> Sequence[tuple[str, str]]:
        """Return (id, message to the user) of held requests that can never pass, likewise.

        They end with an error.
        """

    def forget(self, request_id: str) -> None:
        """Drop a held request: it was aborted, or another gate failed it.

        Nothing is reported about it afterwards, even if it was about to pass: its id may come
        again.
        """
