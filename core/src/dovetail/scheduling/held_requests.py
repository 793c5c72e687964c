"""Requests that nobody may admit yet, whatever their rank: held by gates, or by a pause.

They stand neither in the policy's queue nor in anybody's way. Depends on no policy, no row and no
block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dovetail.interfaces.admission import AdmissionGate
from dovetail.request import EngineCoreRequest, Request
from dovetail.scheduling.admission_gates import AdmissionGates


class HeldRequests:
    """Holds requests until they are let in. closed: whether a pause holds whoever comes."""

    def __init__(self, gates: Sequence[AdmissionGate], timeout_s: float) -> None:
        """timeout_s: how long a gate may hold a request."""
        self.closed = False
        self._admission_gates = AdmissionGates(gates, timeout_s)
        self._aside: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._admission_gates) + len(self._aside)

    def __contains__(self, request: Request) -> bool:
        return request in self._aside or request in self._admission_gates

    def ask(self, asked: EngineCoreRequest) -> list[AdmissionGate]:
        """Return the gates that hold a new request; let a gate's RequestError through."""
        return self._admission_gates.ask(asked)

    def enter(self, request: Request, gates: list[AdmissionGate], now_ns: int) -> bool:
        """Take a new request in; return False if it may continue to the queue at once."""
        if gates:
            self._admission_gates.hold(request, gates, now_ns)
        elif self.closed:
            self._aside[request] = None
        return bool(gates) or self.closed

    def discard(self, request: Request) -> bool:
        """Hold `request` no longer; return whether it was held."""
        held = request in self
        if self._aside.pop(request, self) is self:
            self._admission_gates.discard(request)
        return held

    def close(self, requests: Iterable[Request]) -> None:
        """Hold `requests`, and whoever comes from now on."""
        self.closed = True
        self._aside |= dict.fromkeys(requests)

    def reopen(self) -> list[Request]:
        """Hold only those at gates; return the others in the order of their arrival."""
        self.closed = False
        let_go, self._aside = self._aside, {}
        return sorted(let_go, key=lambda request: request.sequence)

    def take_ready(self) -> list[Request]:
        """Return those whose gates have let them pass, and hold them no longer."""
        if not len(self._admission_gates):
            return []
        ready = self._admission_gates.take_ready()
        if not self.closed:
            return ready
        self._aside |= dict.fromkeys(ready)
        return []

    def shutdown(self) -> None:
        """End the gates. May be called twice."""
        self._admission_gates.shutdown()

    def take_failed(self, now_ns: int) -> list[tuple[Request, str]]:
        """Return those that can never pass, with a message, and hold them no longer."""
        gates = self._admission_gates
        return gates.take_failed(now_ns) if len(gates) else []
