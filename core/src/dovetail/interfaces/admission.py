"""The contract of an admission gate: what a new request has to wait for before it may be scheduled.

A grammar that is compiled, an adapter that is loaded: work that is done elsewhere, in threads of
the gate's own. The scheduler asks its gates once for each new request and then, at every step,
which requests are ready; it never waits, and requests behind pass by. A preempted request does not
come through again. All calls come from the scheduler's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dovetail.clock import Clock
from dovetail.request import EngineCoreRequest, RequestStatus


@dataclass(frozen=True, kw_only=True)
class AdmissionContext:
    """All that a gate is made from. options: the user's, from `plugin_options`."""

    clock: Clock
    options: Mapping[str, object] = field(default_factory=dict)


class AdmissionGate(ABC):
    """Holds some new requests back until what they need is there. No call may block.

    A request that a gate still holds after `admission_timeout_s` ends with an error.
    status: what a held request waits for.
    """

    CONTRACT: ClassVar[str] = "admission"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    status: RequestStatus = RequestStatus.WAITING_FOR_FSM

    def __init__(self, context: AdmissionContext) -> None:  # noqa: B027  # a gate may need nothing
        """Keep what is needed of `context`."""

    @abstractmethod
    def holds(self, request: EngineCoreRequest) -> bool:
        """Return whether `request`, which is new, has to wait; if so, begin what it waits for.

        Each held request is later named once, by `take_ready` or `take_failed`, unless it is
        forgotten first. A RequestError refuses the request.
        """

    @abstractmethod
    def take_ready(self) -> Sequence[str]:
        """Return the ids of held requests that may pass, since the last call; in any order."""

    @abstractmethod
    def take_failed(self) -> Sequence[tuple[str, str]]:
        """Return (id, message for the user) of held requests that can never pass, likewise.

        They end with an error.
        """

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop a held request: it was aborted, it waited too long, or another gate failed it.

        Do not name it afterwards, even if it was about to pass: its id may come again.
        """

    def shutdown(self) -> None:  # noqa: B027  # a gate may have nothing to end
        """End what was begun; nothing else is called after it. May be called twice."""
