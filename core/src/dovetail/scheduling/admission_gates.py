"""Tracks new requests that admission gates hold, until every gate admits them.

Only this module calls `AdmissionGate`s. It does not use the policy or the queue: it reports
requests that passed or failed, and the scheduler queues or ends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.errors import RequestError
from dovetail.interfaces.admission import AdmissionGate
from dovetail.request import EngineCoreRequest, Request, RequestStatus
from dovetail.scheduling.life_cycle import change_status


class AdmissionGates:
    """The held requests, by id, with the gates that have not admitted them yet."""

    def __init__(self, gates: Sequence[AdmissionGate], timeout_s: float) -> None:
        """timeout_s: maximum time that a request may be held. Then it fails."""
        self._gates = tuple(gates)
        self._timeout_s = timeout_s
        self._held: dict[str, tuple[Request, list[AdmissionGate]]] = {}
        self._since_ns: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._held.values())

    def __contains__(self, request: Request) -> bool:
        return self._held.get(request.request_id, (None,))[0] is request

    def find_holding_gates(self, new: EngineCoreRequest) -> list[AdmissionGate]:
        """Return the gates that hold `new`, in order.

        Raises the RequestError of a gate that rejects the request; then no gate holds it.
        """
        holding: list[AdmissionGate] = []
        try:
            for gate in self._gates:
                if gate.holds(new):
                    holding.append(gate)
        except RequestError:
            for gate in holding:
                gate.forget(new.request_id)
            raise
        return holding

    def hold(self, request: Request, gates: list[AdmissionGate], now_ns: int) -> None:
        """Hold `request`, which is WAITING, for `gates`. Change its status to the first gate's."""
        self._held[request.request_id] = (request, gates)
        self._since_ns[request.request_id] = now_ns
        change_status(request, gates[0].status)

    def discard(self, request: Request) -> None:
        """Stop holding `request` and remove it from its gates. Do nothing if it is not held."""
        _, gates = self._held.pop(request.request_id, (request, []))
        self._since_ns.pop(request.request_id, None)
        for gate in gates:
            gate.forget(request.request_id)

    def take_ready(self) -> list[Request]:
        """Remove and return the requests that all gates have admitted, in order of arrival."""
        ready = []
        for gate in self._gates:
            for request_id in gate.take_ready():
                request, gates = self._held[request_id]
                gates.remove(gate)
                if not gates:
                    del self._held[request_id], self._since_ns[request_id]
                    change_status(request, RequestStatus.WAITING)
                    ready.append(request)
        return sorted(ready, key=lambda request: request.sequence)

    def take_failed(self, now_ns: int) -> list[tuple[Request, str]]:
        """Remove requests that failed or were held too long. Return each with a user message."""
        failed = []
        for gate in self._gates:
            for request_id, message in gate.take_failed():
                request, gates = self._held[request_id]
                gates.remove(gate)
                self.discard(request)
                failed.append((request, message))
        limit_ns = now_ns - int(self._timeout_s * 1e9)
        for request_id in [name for name, since in self._since_ns.items() if since <= limit_ns]:
            request, gates = self._held[request_id]
            gate_names = ", ".join(type(gate).__name__ for gate in gates)
            self.discard(request)
            failed.append((request, self._timeout_message(gate_names)))
        return failed

    def shutdown(self) -> None:
        """Shut the gates down."""
        for gate in self._gates:
            gate.shutdown()

    def _timeout_message(self, gate_names: str) -> str:
        return (
            f"the request was not admitted within admission_timeout_s={self._timeout_s:g}: "
            f"{gate_names} was not ready for the request. Send a request with a smaller grammar or "
            "adapter, or raise admission_timeout_s."
        )
