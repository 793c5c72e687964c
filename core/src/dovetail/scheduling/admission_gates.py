"""Tracks new requests that admission gates hold, until every gate admits them.

Only this module calls `AdmissionGate`s. It does not use the policy or the queue: it reports
requests that passed or failed, and the scheduler queues or ends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.errors import ContractError, RequestError
from dovetail.interfaces.admission import AdmissionGate
from dovetail.request import EngineCoreRequest, Request, RequestStatus
from dovetail.scheduling.life_cycle import change_status
from dovetail.value_checks import shorten


class AdmissionGates:
    """The held requests, by id, with the gates that have not admitted them yet."""

    def __init__(self, gates: Sequence[AdmissionGate], timeout_s: float) -> None:
        """timeout_s: seconds after which a request that is still held fails."""
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
        """Remove and return the requests that all gates have admitted, in order of arrival.

        Raises ContractError, naming the gate, for a wrong result.
        """
        ready = []
        for gate in self._gates:
            for request_id in _results(gate, "take_ready"):
                request, gates = self._release(gate, "take_ready", request_id)
                if not gates:
                    del self._held[request.request_id], self._since_ns[request.request_id]
                    change_status(request, RequestStatus.WAITING)
                    ready.append(request)
        return sorted(ready, key=lambda request: request.sequence)

    def take_failed(self, now_ns: int) -> list[tuple[Request, str]]:
        """Remove requests that failed or were held too long. Return each with a user message.

        Raises ContractError, naming the gate, for a wrong result.
        """
        failed = []
        for gate in self._gates:
            for entry in _results(gate, "take_failed"):
                request_id, message = entry if type(entry) is tuple and len(entry) == 2 else ("", 0)
                if not isinstance(message, str):
                    raise _wrong_result(gate, "take_failed", entry, "pairs of an id and a message")
                request, _ = self._release(gate, "take_failed", request_id)
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

    def _release(
        self, gate: AdmissionGate, method: str, request_id: object
    ) -> tuple[Request, list[AdmissionGate]]:
        """Remove `gate` from the gates of a request that it returned. Return both."""
        held = self._held.get(request_id) if isinstance(request_id, str) else None
        if held is None or gate not in held[1]:
            due = "each held request exactly once, and no request after forget()"
            raise _wrong_result(gate, method, request_id, due)
        held[1].remove(gate)
        return held

    def _timeout_message(self, gate_names: str) -> str:
        return (
            f"the request was not admitted within admission_timeout_s={self._timeout_s:g}: "
            f"the admission gate {gate_names} was not ready. Send a request with a smaller grammar "
            "or adapter, or raise admission_timeout_s."
        )


def _results(gate: AdmissionGate, method: str) -> Sequence[object]:
    """Return the result of a method of `gate` without arguments, which must be a sequence."""
    results: object = getattr(gate, method)()
    if not isinstance(results, Sequence) or isinstance(results, str):
        raise _wrong_result(gate, method, results, "a list or tuple")
    return results


def _wrong_result(gate: AdmissionGate, method: str, result: object, due: str) -> ContractError:
    return ContractError(
        f"The admission gate {type(gate).__name__} returned {shorten(result)} from {method}(); "
        f"it must return {due}."
    )
