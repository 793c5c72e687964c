"""New requests that gates hold back, until all of their gates have let them pass.

The one place that talks to `AdmissionGate`s. Knows neither policy nor queue: it says who may pass
and who can never pass; what becomes of them is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.errors import RequestError
from dovetail.interfaces.admission import AdmissionGate
from dovetail.request import EngineCoreRequest, Request, RequestStatus
from dovetail.scheduling.life_cycle import change_status


class AdmissionGates:
    """Holds requests, by id, with the gates that each still waits for."""

    def __init__(self, gates: Sequence[AdmissionGate]) -> None:
        self._gates = tuple(gates)
        self._held: dict[str, tuple[Request, list[AdmissionGate]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._held.values())

    def __contains__(self, request: Request) -> bool:
        return self._held.get(request.request_id, (None,))[0] is request

    def ask(self, asked: EngineCoreRequest) -> list[AdmissionGate]:
        """Return the gates that hold `asked`, in their order; let a gate's RequestError through.

        Then no gate holds it.
        """
        holding: list[AdmissionGate] = []
        try:
            for gate in self._gates:
                if gate.holds(asked):
                    holding.append(gate)
        except RequestError:
            for gate in holding:
                gate.forget(asked.request_id)
            raise
        return holding

    def hold(self, request: Request, gates: list[AdmissionGate]) -> None:
        """Hold `request`, which is WAITING, for `gates`; its status is the first one's."""
        self._held[request.request_id] = (request, gates)
        change_status(request, gates[0].status)

    def discard(self, request: Request) -> None:
        """Hold `request` no longer, and let its gates forget it; do nothing if it is not held."""
        _, gates = self._held.pop(request.request_id, (request, []))
        for gate in gates:
            gate.forget(request.request_id)

    def take_ready(self) -> list[Request]:
        """Return, and hold no longer, those whose last gate has let them pass; order of arrival."""
        ready = []
        for gate in self._gates:
            for request_id in gate.take_ready():
                request, gates = self._held[request_id]
                gates.remove(gate)
                if not gates:
                    del self._held[request_id]
                    change_status(request, RequestStatus.WAITING)
                    ready.append(request)
        return sorted(ready, key=lambda request: request.sequence)

    def take_failed(self) -> list[tuple[Request, str]]:
        """Return, and hold no longer, those that some gate has failed, with its message."""
        failed = []
        for gate in self._gates:
            for request_id, message in gate.take_failed():
                request, gates = self._held[request_id]
                gates.remove(gate)
                self.discard(request)
                failed.append((request, message))
        return failed
