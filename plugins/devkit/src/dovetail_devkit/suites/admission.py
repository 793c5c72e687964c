"""The conformance suite of the admission gate contract, for any gate.

This module needs no engine. It calls a gate as the scheduler does: each new request once, and then
`take_ready` and `take_failed` in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dovetail.clock import MonotonicClock, sleep
from dovetail.errors import RequestError
from dovetail.interfaces.admission import AdmissionContext, AdmissionGate
from dovetail.request import EngineCoreRequest, RequestStatus
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import checking, expect

NUM_REQUESTS = 8
MAX_CALL_NS = 50_000_000
"""Maximum time of a call to a gate. The scheduler, and so all running requests, wait for it."""
POLL_S = 0.001
NUM_POLLS_AFTER_FORGET = 50
HELD_STATUSES = frozenset(
    status for status in RequestStatus if status.name.startswith("WAITING_FOR_")
)


def make_request(request_id: str) -> EngineCoreRequest:
    """Return a new request with a prompt of three tokens."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=(1, 2, 3),
        sampling_params=SamplingParams(max_tokens=4),
        max_tokens=4,
        arrival_ns=MonotonicClock().now_ns(),
    )


class _GateDriver:
    """Calls a gate, and checks the time and the result of each call.

    make_request: creates a request with an id. ended: ids that the gate has returned.
    """

    def __init__(
        self, gate: AdmissionGate, make_request: Callable[[str], EngineCoreRequest]
    ) -> None:
        self._gate, self._make_request = gate, make_request
        self.held: set[str] = set()
        self.ended: list[str] = []

    def add(self, request_id: str) -> None:
        """Add a request. It may be rejected."""
        try:
            is_held = self._call("holds", self._make_request(request_id))
        except RequestError:
            return
        expect(isinstance(is_held, bool), f"holds() returns {is_held!r}; expected a bool")
        if is_held:
            self.held.add(request_id)

    def poll(self) -> None:
        """Take the requests that are ready, and those that have failed."""
        for request_id in self._take("take_ready"):
            self._end(request_id, "take_ready")
        for entry in self._take("take_failed"):
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise AssertionError(
                    f"take_failed() returns {entry!r}; expected pairs of an id and a message"
                )
            request_id, message = entry
            expect(
                isinstance(message, str) and bool(message),
                f"take_failed() returns the message {message!r}; expected a non-empty str",
            )
            self._end(request_id, "take_failed")

    def forget(self, request_id: str) -> None:
        """Call `forget` for a held request."""
        self._call("forget", request_id)
        self.held.discard(request_id)

    def wait(self, limit_s: float) -> None:
        """Poll until no request is held. Raise AssertionError after `limit_s` seconds."""
        clock = MonotonicClock()
        end_ns = clock.now_ns() + int(limit_s * 1e9)
        self.poll()
        while self.held:
            expect(
                clock.now_ns() < end_ns,
                f"the gate still holds {len(self.held)} requests after {limit_s} s; if it waits "
                f"for an event that the suite cannot cause, pass a larger limit_s or other options",
            )
            sleep(POLL_S)
            self.poll()

    def _take(self, method: str) -> Sequence[object]:
        taken = self._call(method)
        if not isinstance(taken, Sequence) or isinstance(taken, str):
            raise AssertionError(f"{method}() returns {taken!r}; expected a list or tuple")
        return taken

    def _end(self, request_id: object, method: str) -> None:
        expect(
            request_id in self.held,
            f"{method}() returns {request_id!r}, which the gate does not hold; each held request "
            f"must be returned once, and not after forget()",
        )
        self.held.discard(str(request_id))
        self.ended.append(str(request_id))

    def _call(self, method: str, *arguments: object) -> object:
        clock = MonotonicClock()
        start_ns = clock.now_ns()
        try:
            result: object = getattr(self._gate, method)(*arguments)
        finally:
            took_ns = clock.now_ns() - start_ns
        expect(
            took_ns < MAX_CALL_NS,
            f"{method}() takes {took_ns / 1e6:.0f} ms; a gate must not block the scheduler",
        )
        return result


@checking("admission")
def check_admission(
    gate_cls: type[AdmissionGate],
    *,
    options: Mapping[str, object] | None = None,
    make_request: Callable[[str], EngineCoreRequest] = make_request,
    limit_s: float = 10.0,
) -> None:
    """Check a gate against its contract. Raise AssertionError with the violated rule.

    options: constructor options; None for none. make_request: returns a request with the given id,
    for a gate that holds only special requests. limit_s: how long the gate may hold a request.
    """
    make = partial(AdmissionContext, clock=MonotonicClock(), options=options or {})
    gate = gate_cls(make())
    expect(
        gate.status in HELD_STATUSES,
        f"status={gate.status!r} is not a status of held requests; expected one of "
        f"{', '.join(sorted(status.name for status in HELD_STATUSES))}",
    )
    driver = _GateDriver(gate, make_request)
    driver.poll()  # a gate without requests returns none
    for index in range(NUM_REQUESTS):
        driver.add(f"request-{index}")
    driver.wait(limit_s)
    _check_forget(driver, limit_s)
    gate.shutdown()
    held = gate_cls(make())
    _GateDriver(held, make_request).add("held-at-shutdown")
    held.shutdown()


def _check_forget(driver: _GateDriver, limit_s: float) -> None:
    """Check that a dropped request is never returned, and that its id can be used again."""
    names = [f"dropped-{index}" for index in range(NUM_REQUESTS)]
    for name in names:
        driver.add(name)
    dropped = [name for name in names if name in driver.held]
    for name in dropped:
        driver.forget(name)
    for _ in range(NUM_POLLS_AFTER_FORGET):
        driver.poll()
        sleep(POLL_S)
    for name in dropped:
        driver.add(name)
    driver.wait(limit_s)
    for name in driver.ended:
        expect(driver.ended.count(name) == 1, f"the gate returns {name!r} more than once")
