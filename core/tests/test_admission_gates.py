"""Gates hold new requests; the last gate to open lets them pass."""

import pytest

from dovetail.errors import RequestError
from dovetail.request import Request, RequestStatus
from dovetail.scheduling.admission_gates import AdmissionGates
from dovetail_devkit.scheduler.gate import FakeGate
from dovetail_devkit.suites.scheduler import make_request


class RefusingGate(FakeGate):
    def holds(self, request):
        raise RequestError("this text is not a grammar")


def enter(house, name, now_ns=0):
    asked = make_request(name)
    request = Request(asked, max_model_len=16, sequence=len(house))
    gates = house.ask(asked)
    if gates:
        house.hold(request, gates, now_ns)
    return request


def test_a_request_that_no_gate_holds_is_admitted_at_once():
    gate = FakeGate(wants=lambda request: request.request_id == "b")
    house = AdmissionGates([gate], 60)
    assert enter(house, "a").status is RequestStatus.WAITING
    held = enter(house, "b")
    assert list(house) == [held] and gate.held == ["b"]
    assert held.status is RequestStatus.WAITING_FOR_FSM
    assert house.take_ready() == house.take_failed(0) == []


def test_all_gates_must_open_in_any_order():
    first, second = FakeGate(), FakeGate(wants=lambda request: request.request_id != "c")
    house = AdmissionGates([first, second], 60)
    a, b, c = (enter(house, name) for name in "abc")
    second.open("a")
    first.open("c")
    first.open("b")
    assert house.take_ready() == [c]
    first.open("a")
    second.open("b")
    assert house.take_ready() == [a, b]  # in the order of arrival
    assert len(house) == 0


def test_one_failed_gate_rejects_the_request_at_all_gates():
    first, second = FakeGate(), FakeGate()
    house = AdmissionGates([first, second], 60)
    a, b = (enter(house, name) for name in "ab")
    second.fail("a", "no such grammar")
    assert house.take_failed(0) == [(a, "no such grammar")]
    assert first.held == ["b"] and list(house) == [b]
    first.open("b")
    second.fail("b", "too late")
    assert house.take_ready() == []
    assert house.take_failed(0) == [(b, "too late")]


def test_two_gates_can_fail_at_once():
    first, second = FakeGate(), FakeGate()
    house = AdmissionGates([first, second], 60)
    a = enter(house, "a")
    first.fail("a", "one")
    second.fail("a", "two")
    assert house.take_failed(0) == [(a, "one")]
    assert house.take_failed(0) == []


def test_a_discarded_request_is_forgotten_even_if_its_gates_have_opened():
    first, second = FakeGate(), FakeGate()
    house = AdmissionGates([first, second], 60)
    a, b = (enter(house, name) for name in "ab")
    first.open("a")
    house.discard(a)
    house.discard(a)  # no gate holds it any longer
    assert house.take_ready() == [] and list(house) == [b]
    again = enter(house, "a")
    assert list(house) == [b, again]


def test_a_rejected_request_is_held_by_no_gate():
    gate = FakeGate()
    house = AdmissionGates([gate, RefusingGate()], 60)
    with pytest.raises(RequestError, match="not a grammar"):
        enter(house, "a")
    assert gate.held == [] and len(house) == 0


def test_a_request_that_is_held_too_long_fails_and_leaves_its_gates():
    first, second = FakeGate(), FakeGate()
    house = AdmissionGates([first, second], 2.5)
    a, b = enter(house, "a"), enter(house, "b", now_ns=10**9)
    first.open("a")
    assert house.take_ready() == [] and house.take_failed(2_499_999_999) == []
    ((late, message),) = house.take_failed(2_500_000_000)
    assert late is a and "admission_timeout_s=2.5: FakeGate was not ready" in message
    assert list(house) == [b] and second.held == ["b"]
    first.open("b")
    second.open("b")
    assert house.take_ready() == [b] and house.take_failed(10**12) == []
