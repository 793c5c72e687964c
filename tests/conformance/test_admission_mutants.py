"""The suite of admission gates detects faulty gates: each mutant has one fault."""

import re
import time

import pytest

from dovetail.request import RequestStatus
from dovetail_devkit import load_suite
from dovetail_devkit.fakes.admission import FakeAdmissionGate


class ReturnsReadyRequestsTwice(FakeAdmissionGate):
    def take_ready(self):
        ready = super().take_ready()
        self._last, last = ready, getattr(self, "_last", [])
        return [*ready, *last]


class IgnoresForget(FakeAdmissionGate):
    def forget(self, request_id):
        pass


class NeverAdmits(FakeAdmissionGate):
    def take_ready(self):
        return []


class BlocksInHolds(FakeAdmissionGate):
    def holds(self, request):
        time.sleep(0.06)
        return super().holds(request)


class FailsWithoutAMessage(FakeAdmissionGate):
    def take_ready(self):
        for request_id in tuple(self.held):
            self.fail(request_id, "")
        return []


class HoldsWithARunningStatus(FakeAdmissionGate):
    status = RequestStatus.RUNNING


MUTANTS = [
    (ReturnsReadyRequestsTwice, "each held request must be returned once"),
    (IgnoresForget, "not after forget()"),
    (BlocksInHolds, "must not block the scheduler"),
    (FailsWithoutAMessage, "expected a non-empty str"),
    (HoldsWithARunningStatus, "is not a status of held requests"),
]


@pytest.mark.parametrize(("mutant", "law"), MUTANTS)
def test_a_faulty_admission_gate_is_detected(mutant, law):
    with pytest.raises(AssertionError, match=re.escape(law)):
        load_suite("admission")(mutant)


def test_a_gate_that_never_admits_a_request_is_detected():
    with pytest.raises(AssertionError, match=r"still holds 8 requests after 0\.2 s"):
        load_suite("admission")(NeverAdmits, limit_s=0.2)
