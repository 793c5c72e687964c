"""Every operation on a request works in every status, and each request frees its resources."""

from array import array
from functools import partial

import pytest

from dovetail.interfaces import PauseScope, SchedulerLimits
from dovetail.request import EngineCoreRequest, RequestStatus
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit.scheduler.program import Referee
from dovetail_devkit.scheduler.random_programs import Program, make_kv_cache

S = RequestStatus
HELD, FREE = 0, 3
"""Seeds: the gate holds requests with the first seed and admits those with the second."""


def request(name, num_prompt=9, *, seed=FREE, max_tokens=4, first=0):
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=array("i", [(first + place) % 31 for place in range(num_prompt)]),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=seed,
    )


def make_referee(*, num_blocks=20, max_num_seqs=2, **program):
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=32, max_model_len=40)
    kv_cache = make_kv_cache(num_blocks=num_blocks, block_size=4)
    given = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=2, **program)
    return Referee(Scheduler, given, after_step=Scheduler.check_integrity)


def step(referee):
    referee.schedule()
    while referee.num_out:
        referee.settle()


def waits():
    referee = make_referee(max_num_seqs=1)
    referee.add(request("other", max_tokens=6))
    step(referee)
    referee.add(request("r"))
    return referee


def waits_at_a_gate():
    referee = make_referee(holds=True)
    referee.add(request("r", seed=HELD))
    return referee


def waits_for_remote_kvs():
    """Every second load of the fake connector takes longer than its plan."""
    referee = make_referee(connected=True)
    for name in ("stored", "loaded at once"):
        referee.add(request(name))
        referee.drain()
        referee.reset()
    referee.add(request("r"))
    referee.schedule()
    return referee


def runs():
    referee = make_referee()
    referee.add(request("r"))
    step(referee)
    return referee


def is_preempted():
    referee = make_referee(num_blocks=8)
    referee.add(request("other", 11, max_tokens=8))
    referee.add(request("r", 11, max_tokens=8, first=15))
    while status(referee) is not S.PREEMPTED:
        step(referee)
    return referee


WAYS = {
    S.WAITING: waits,
    S.WAITING_FOR_FSM: waits_at_a_gate,
    S.WAITING_FOR_REMOTE_KVS: waits_for_remote_kvs,
    S.RUNNING: runs,
    S.PREEMPTED: is_preempted,
}


def status(referee):
    alive = referee.scheduler._state.requests
    return alive["r"].status if "r" in alive else None


def abort(referee):
    referee.abort(["r"])
    assert status(referee) is None


def finish(referee):
    referee.drain()
    assert status(referee) is None


def shut_down(referee):
    referee.scheduler.shutdown()
    assert referee.scheduler.depth().num_active == 0


def pause(referee, scope):
    """`pause("all")` keeps the status; with `pause("new")` started requests continue."""
    before = status(referee)
    referee.pause(scope)
    for _ in range(3):
        while referee.num_out == 2:
            referee.settle()
        referee.schedule()
    begun = before in {S.RUNNING, S.PREEMPTED, S.WAITING_FOR_REMOTE_KVS}
    if scope is PauseScope.ALL:
        # Running loads finish during a pause.
        assert status(referee) in {before, S.WAITING}
        assert referee.scheduler.depth().num_active == 0
    elif not begun:
        assert status(referee) is before
    referee.drain()  # `drain` resumes the scheduler
    assert not referee.alive


def abort_in_a_pause(referee):
    referee.pause(PauseScope.ALL)
    abort(referee)
    referee.pause(PauseScope.NEW)
    referee.drain()


ACTIONS = {
    "abort": abort,
    "finish": finish,
    "shut down": shut_down,
    "pause all": partial(pause, scope=PauseScope.ALL),
    "pause new": partial(pause, scope=PauseScope.NEW),
    "abort in a pause": abort_in_a_pause,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("out", [False, True], ids=["settled", "a plan is out"])
@pytest.mark.parametrize("where", WAYS, ids=lambda where: where.name)
def test_every_operation_on_a_request_is_correct_in_every_status(where, out, action):
    referee = WAYS[where]()
    assert status(referee) is where
    if out and not referee.num_out:
        referee.schedule()
    ACTIONS[action](referee)
    if action != "shut down":
        referee.drain()
        referee.reset()
        assert referee.scheduler.reset_prefix_cache()


def test_a_request_that_waits_at_a_gate_delays_no_other_request():
    referee = make_referee(holds=True)
    referee.add(request("r", seed=HELD))
    referee.add(request("behind"))
    for _ in range(4):
        step(referee)
    assert set(referee.alive) == {"r"} and status(referee) is S.WAITING_FOR_FSM
    referee.open_gate("r")
    step(referee)
    assert status(referee) is S.RUNNING


def test_a_gate_that_fails_ends_its_request_with_a_message():
    referee = make_referee(holds=True)
    referee.add(request("r", seed=HELD))
    referee.open_gate("r", fails=True)
    referee.schedule()
    (ending,) = referee.settle().finished
    assert (ending.request_id, ending.reason) == ("r", "error")
    assert ending.message == "requested failure: r"


def test_a_preempted_request_is_not_checked_by_gates_again():
    referee = make_referee(num_blocks=8, holds=True)
    referee.add(request("r", 11, max_tokens=8, seed=HELD, first=15))
    referee.add(request("other", 11, max_tokens=8))
    step(referee)
    referee.open_gate("r")
    while status(referee) is not S.PREEMPTED:
        step(referee)
    assert not referee.holds.gate.held
    referee.drain()


def test_a_request_that_waits_for_remote_kvs_has_no_row_and_delays_no_other_request():
    referee = waits_for_remote_kvs()
    assert referee.scheduler.depth().num_running == 0
    referee.add(request("behind", first=11))
    referee.schedule()
    assert [join.request_id for join in referee.plans[-1].joins] == ["behind"]
    referee.drain()


def test_started_requests_finish_during_a_pause_of_new_requests():
    referee = make_referee(num_blocks=8)
    referee.add(request("a", 11, max_tokens=8))
    referee.add(request("r", 11, max_tokens=8, first=15))
    step(referee)
    referee.pause(PauseScope.NEW)
    referee.add(request("new"))
    while referee.scheduler.depth().num_active:
        step(referee)  # r is preempted and admitted again
    assert set(referee.alive) == {"new"}
    assert referee.scheduler.depth().num_paused == 1
    referee.drain()


def test_a_new_pause_scope_replaces_the_previous_one():
    referee = make_referee()
    referee.add(request("r"))
    referee.pause(PauseScope.NEW)
    referee.pause(PauseScope.ALL)
    step(referee)
    referee.pause(PauseScope.NEW)
    step(referee)
    assert status(referee) is S.WAITING
    referee.resume()
    step(referee)
    assert status(referee) is S.RUNNING
