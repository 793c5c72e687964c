"""Requests that gates or a pause hold, so that they cannot be admitted yet.

They are not in the policy's queue and do not delay other requests. This module does not use
policies, batch slots or blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dovetail.interfaces.admission import AdmissionGate
from dovetail.request import EngineCoreRequest, Request
from dovetail.scheduling.admission_gates import AdmissionGates


class HeldRequests:
    """The requests that may not be queued yet. closed: whether a pause holds new requests."""

    def __init__(self, gates: Sequence[AdmissionGate], timeout_s: float) -> None:
        """timeout_s: how long a gate may hold a request."""
        self.closed = False
        self._admission_gates = AdmissionGates(gates, timeout_s)
        self._aside: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._admission_gates) + len(self._aside)

    def __contains__(self, request: Request) -> bool:
        return request in self._aside or request in self._admission_gates

    def find_holding_gates(self, new: EngineCoreRequest) -> list[AdmissionGate]:
        """Return the gates that hold a new request. Raise RequestError if a gate rejects it."""
        return self._admission_gates.find_holding_gates(new)

    def enter(self, request: Request, gates: list[AdmissionGate], now_ns: int) -> bool:
        """Hold a new request if it has gates or a pause is in effect. Return whether it is held."""
        if gates:
            self._admission_gates.hold(request, gates, now_ns)
        elif self.closed:
            self._aside[request] = None
        return bool(gates) or self.closed

    def discard(self, request: Request) -> bool:
        """Stop holding `request`. Return whether it was held."""
        held = request in self
        if self._aside.pop(request, self) is self:
            self._admission_gates.discard(request)
        return held

    def close(self, requests: Iterable[Request]) -> None:
        """Hold `requests` and every request that arrives from now on."""
        self.closed = True
        self._aside |= dict.fromkeys(requests)

    def reopen(self) -> list[Request]:
        """End the pause. Return the requests that it held, in order of arrival."""
        self.closed = False
        let_go, self._aside = self._aside, {}
        return sorted(let_go, key=lambda request: request.sequence)

    def take_ready(self) -> list[Request]:
        """Remove and return the requests that their gates have admitted."""
        if not len(self._admission_gates):
            return []
        ready = self._admission_gates.take_ready()
        if not self.closed:
            return ready
        self._aside |= dict.fromkeys(ready)
        return []

    def shutdown(self) -> None:
        """Shut the gates down. May be called twice."""
        self._admission_gates.shutdown()

    def take_failed(self, now_ns: int) -> list[tuple[Request, str]]:
        """Remove the requests that failed at a gate. Return each with a message for its user."""
        gates = self._admission_gates
        return gates.take_failed(now_ns) if len(gates) else []
