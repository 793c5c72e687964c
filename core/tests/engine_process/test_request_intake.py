"""Requests that arrive together are added in several iterations of the engine loop."""

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.process.request_intake import INTAKE_NS, RequestIntake
from dovetail.errors import RequestError
from dovetail.transport.wire_types import wire_request
from dovetail_devkit.suites.scheduler import make_request


class SlowCore:
    """A fake engine core that needs a third of a time slice to add a request, and rejects "bad"."""

    def __init__(self, clock, runs):
        self.clock, self.runs, self.taken = clock, runs, []

    def has_work(self):
        return self.runs or bool(self.taken)

    def add_request(self, request):
        self.clock.advance(INTAKE_NS // 3 + 1)
        if request.request_id == "bad":
            raise RequestError("no", parameter="prompt")
        self.taken.append(request.request_id)


@pytest.mark.parametrize("runs", [False, True])
def test_requests_are_added_in_time_slices_and_delay_no_step_of_a_busy_engine(runs):
    clock = ManualClock()
    core = SlowCore(clock, runs)
    intake = RequestIntake(clock)
    names = ["a", "bad", "c", "d", "e", "f", "g", "h"]
    intake.begin_time_slice()
    batch = [(name, wire_request(make_request(name))) for name in names]
    results = []
    intake.begin_batch(batch, core.add_request, results.append, holds_steps=not core.has_work())
    for _ in range(3):
        assert intake.is_waiting and intake.holds_steps is not runs
        begin_ns = clock.now_ns()
        intake.begin_time_slice()
        assert not results
        intake.proceed()
        assert clock.now_ns() - begin_ns <= INTAKE_NS + 3
    (rejected,) = results
    assert {name: (str(error), error.parameter) for name, error in rejected.items()} == {
        "bad": ("no", "prompt")
    }
    assert not intake.is_waiting and not intake.holds_steps
    assert core.taken == [name for name in names if name != "bad"]
