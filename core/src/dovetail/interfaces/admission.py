"""The contract of an admission gate: it holds new requests until they may be scheduled.

For example, a gate compiles a grammar or loads an adapter, in its own threads. The scheduler passes
each new request to its gates once. In every step it asks the gates which held requests are ready.
The scheduler never waits for a gate, and later requests may overtake held ones. A preempted request
does not pass the gates again. All calls come from the scheduler's thread.
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
    """Constructor arguments of a gate. options: the user's options from `plugin_options`."""

    clock: Clock
    options: Mapping[str, object] = field(default_factory=dict)


class AdmissionGate(ABC):
    """Holds new requests until their resources are available. No call may block.

    A request that a gate still holds after `admission_timeout_s` ends with an error.
    status: the status that held requests get.
    """

    CONTRACT: ClassVar[str] = "admission"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    status: RequestStatus = RequestStatus.WAITING_FOR_FSM

    def __init__(self, context: AdmissionContext) -> None:  # noqa: B027  # a gate may need nothing
        """Create the gate."""

    @abstractmethod
    def holds(self, request: EngineCoreRequest) -> bool:
        """Return whether the new `request` has to wait. If so, start the work that it waits for.

        `take_ready` or `take_failed` later returns each held request once, unless `forget` is
        called first. Raise RequestError to reject the request.
        """

    @abstractmethod
    def take_ready(self) -> Sequence[str]:
        """Return the ids of held requests that became ready since the last call, in any order."""

    @abstractmethod
    def take_failed(self) -> Sequence[tuple[str, str]]:
        """Return (id, message for the user) of held requests that failed since the last call.

        They end with an error.
        """

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop a held request that was aborted, timed out or failed at another gate.

        Do not return its id afterwards, even if it is ready: a new request may use the id.
        """

    def shutdown(self) -> None:  # noqa: B027  # a gate may have nothing to stop
        """Stop all work. Only `shutdown` may be called afterwards."""
