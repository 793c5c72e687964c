"""New requests that gates hold back, until all of their gates have let them pass.

The one place that talks to `AdmissionGate`s. Depends on neither policy nor queue: it says who may
pass and who can never pass; what becomes of them is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.errors import RequestError
from dovetail.interfaces.admission import AdmissionGate
from dovetail.request import EngineCoreRequest, Request, RequestStatus
from dovetail.scheduling.life_cycle import change_status


class AdmissionGates:
    """Holds requests, by id, with the gates that each still waits for."""

    def __init__(self, gates: Sequence[AdmissionGate], timeout_s: float) -> None:
        """timeout_s: after which a request that is still held has failed."""
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

    def hold(self, request: Request, gates: list[AdmissionGate], now_ns: int) -> None:
        """Hold `request`, which is WAITING, for `gates`; its status is the first one's."""
        self._held[request.request_id] = (request, gates)
        self._since_ns[request.request_id] = now_ns
        change_status(request, gates[0].status)

    def discard(self, request: Request) -> None:
        """Hold `request` no longer, and let its gates forget it; do nothing if it is not held."""
        _, gates = self._held.pop(request.request_id, (request, []))
        self._since_ns.pop(request.request_id, None)
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
                    del self._held[request_id], self._since_ns[request_id]
                    change_status(request, RequestStatus.WAITING)
                    ready.append(request)
        return sorted(ready, key=lambda request: request.sequence)

    def take_failed(self, now_ns: int) -> list[tuple[Request, str]]:
        """Return, and hold no longer, those that a gate has failed or holds for too long.

        Each with a message for the user.
        """
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
            whose = ", ".join(type(gate).__name__ for gate in gates)
            self.discard(request)
            failed.append((request, self._late_message(whose)))
        return failed

    def shutdown(self) -> None:
        """End the gates."""
        for gate in self._gates:
            gate.shutdown()

    def _late_message(self, whose: str) -> str:
        return (
            f"the request was not admitted within admission_timeout_s={self._timeout_s:g}: {whose} "
            "was not ready for it. Send a request that needs less, or raise admission_timeout_s."
        )
