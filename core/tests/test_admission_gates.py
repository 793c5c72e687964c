"""A request is admitted when all gates that hold it have opened."""

import pytest

from dovetail.errors import ContractError, RequestError
from dovetail.request import Request, RequestStatus
from dovetail.scheduling.admission_gates import AdmissionGates
from dovetail_devkit.scheduler.gate import FakeGate
from dovetail_devkit.suites.scheduler import make_request


class RejectingGate(FakeGate):
    def holds(self, request):
        raise RequestError("this text is not a grammar")


def enter(admission_gates, name, now_ns=0):
    core_request = make_request(name)
    request = Request(core_request, max_model_len=16, sequence=len(admission_gates))
    gates = admission_gates.find_holding_gates(core_request)
    if gates:
        admission_gates.hold(request, gates, now_ns)
    return request


def test_a_request_that_no_gate_holds_is_admitted_immediately():
    gate = FakeGate(wants=lambda request: request.request_id == "b")
    admission_gates = AdmissionGates([gate], 60)
    assert enter(admission_gates, "a").status is RequestStatus.WAITING
    held = enter(admission_gates, "b")
    assert list(admission_gates) == [held] and gate.held == ["b"]
    assert held.status is RequestStatus.WAITING_FOR_FSM
    assert admission_gates.take_ready() == admission_gates.take_failed(0) == []


def test_a_request_is_admitted_when_all_its_gates_have_opened_in_any_order():
    first, second = FakeGate(), FakeGate(wants=lambda request: request.request_id != "c")
    admission_gates = AdmissionGates([first, second], 60)
    a, b, c = (enter(admission_gates, name) for name in "abc")
    second.open("a")
    first.open("c")
    first.open("b")
    assert admission_gates.take_ready() == [c]
    first.open("a")
    second.open("b")
    assert admission_gates.take_ready() == [a, b]  # in order of arrival
    assert len(admission_gates) == 0


def test_a_request_is_rejected_at_all_gates_if_one_gate_fails():
    first, second = FakeGate(), FakeGate()
    admission_gates = AdmissionGates([first, second], 60)
    a, b = (enter(admission_gates, name) for name in "ab")
    second.fail("a", "no such grammar")
    assert admission_gates.take_failed(0) == [(a, "no such grammar")]
    assert first.held == ["b"] and list(admission_gates) == [b]
    first.open("b")
    second.fail("b", "too late")
    assert admission_gates.take_ready() == []
    assert admission_gates.take_failed(0) == [(b, "too late")]


def test_two_gates_can_reject_a_request_in_the_same_step():
    first, second = FakeGate(), FakeGate()
    admission_gates = AdmissionGates([first, second], 60)
    a = enter(admission_gates, "a")
    first.fail("a", "one")
    second.fail("a", "two")
    assert admission_gates.take_failed(0) == [(a, "one")]
    assert admission_gates.take_failed(0) == []


def test_a_discarded_request_is_not_admitted_even_if_its_gates_open():
    first, second = FakeGate(), FakeGate()
    admission_gates = AdmissionGates([first, second], 60)
    a, b = (enter(admission_gates, name) for name in "ab")
    first.open("a")
    admission_gates.discard(a)
    admission_gates.discard(a)  # no gate holds the request any longer
    assert admission_gates.take_ready() == [] and list(admission_gates) == [b]
    again = enter(admission_gates, "a")
    assert list(admission_gates) == [b, again]


def test_a_rejected_request_is_held_by_no_gate():
    gate = FakeGate()
    admission_gates = AdmissionGates([gate, RejectingGate()], 60)
    with pytest.raises(RequestError, match="not a grammar"):
        enter(admission_gates, "a")
    assert gate.held == [] and len(admission_gates) == 0


def test_a_request_that_is_held_too_long_fails_and_is_removed_from_its_gates():
    first, second = FakeGate(), FakeGate()
    admission_gates = AdmissionGates([first, second], 2.5)
    a, b = enter(admission_gates, "a"), enter(admission_gates, "b", now_ns=10**9)
    first.open("a")
    assert admission_gates.take_ready() == [] and admission_gates.take_failed(2_499_999_999) == []
    ((late, message),) = admission_gates.take_failed(2_500_000_000)
    assert late is a and "=2.5: the admission gate FakeGate was not ready." in message
    assert list(admission_gates) == [b] and second.held == ["b"]
    first.open("b")
    second.open("b")
    assert admission_gates.take_ready() == [b] and admission_gates.take_failed(10**12) == []


WRONG_RESULTS = [
    ("take_ready", None),
    ("take_ready", "a"),
    ("take_ready", (str(n) for n in range(3))),
    ("take_ready", ["a", "a"]),
    ("take_ready", ["unknown"]),
    ("take_ready", [[]]),
    ("take_failed", 7),
    ("take_failed", ["a"]),
    ("take_failed", [("a", None)]),
    ("take_failed", [(["a"], "no such grammar")]),
    ("take_failed", [("unknown", "no such grammar")]),
]


@pytest.mark.parametrize(("method", "result"), WRONG_RESULTS)
def test_the_error_for_an_invalid_gate_result_names_the_gate_and_the_method(method, result):
    gate = FakeGate()
    admission_gates = AdmissionGates([gate, FakeGate()], 60)
    enter(admission_gates, "a")
    setattr(gate, method, lambda: result)
    with pytest.raises(ContractError, match=rf"FakeGate returned .* from {method}\(\)"):
        getattr(admission_gates, method)(*([0] if method == "take_failed" else []))
