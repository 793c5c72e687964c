"""Every operation on a request works in every status, and each request frees its resources."""

from array import array
from functools import partial

import pytest

from dovetail.interfaces import PauseScope, SchedulerLimits
from dovetail.request import EngineCoreRequest, RequestStatus
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import Program, make_kv_cache

S = RequestStatus
HELD, FREE = 0, 3
"""Seeds of requests: the gate holds requests with seed `HELD` and admits other requests."""


def request(name, num_prompt=9, *, seed=FREE, max_tokens=4, first=0):
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=array("i", [(first + index) % 31 for index in range(num_prompt)]),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=seed,
    )


def make_driver(*, num_blocks=20, max_num_seqs=2, **program):
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=32, max_model_len=40)
    kv_cache = make_kv_cache(num_blocks=num_blocks, block_size=4)
    arguments = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=2, **program)
    return SchedulerDriver(Scheduler, arguments, after_step=Scheduler.check_integrity)


def step(driver):
    driver.schedule()
    while driver.num_out:
        driver.settle()


def waits():
    driver = make_driver(max_num_seqs=1)
    driver.add(request("other", max_tokens=6))
    step(driver)
    driver.add(request("r"))
    return driver


def waits_at_a_gate():
    driver = make_driver(holds=True)
    driver.add(request("r", seed=HELD))
    return driver


def waits_for_remote_kvs():
    """Return a driver whose request "r" waits for a load. Every second load of the fake is slow."""
    driver = make_driver(connected=True)
    for name in ("stored", "loaded at once"):
        driver.add(request(name))
        driver.drain()
        driver.reset()
    driver.add(request("r"))
    driver.schedule()
    return driver


def runs():
    driver = make_driver()
    driver.add(request("r"))
    step(driver)
    return driver


def is_preempted():
    driver = make_driver(num_blocks=8)
    driver.add(request("other", 11, max_tokens=8))
    driver.add(request("r", 11, max_tokens=8, first=15))
    while status(driver) is not S.PREEMPTED:
        step(driver)
    return driver


WAYS = {
    S.WAITING: waits,
    S.WAITING_FOR_FSM: waits_at_a_gate,
    S.WAITING_FOR_REMOTE_KVS: waits_for_remote_kvs,
    S.RUNNING: runs,
    S.PREEMPTED: is_preempted,
}


def status(driver):
    alive = driver.scheduler._state.requests
    return alive["r"].status if "r" in alive else None


def abort(driver):
    driver.abort(["r"])
    assert status(driver) is None


def finish(driver):
    driver.drain()
    assert status(driver) is None


def shut_down(driver):
    driver.scheduler.shutdown()
    assert driver.scheduler.depth().num_active == 0


def pause(driver, scope):
    """`pause("all")` keeps the status. With `pause("new")` started requests continue."""
    before = status(driver)
    driver.pause(scope)
    for _ in range(3):
        while driver.num_out == 2:
            driver.settle()
        driver.schedule()
    start = before in {S.RUNNING, S.PREEMPTED, S.WAITING_FOR_REMOTE_KVS}
    if scope is PauseScope.ALL:
        # Running loads finish during a pause.
        assert status(driver) in {before, S.WAITING}
        assert driver.scheduler.depth().num_active == 0
    elif not start:
        assert status(driver) is before
    driver.drain()  # `drain` resumes the scheduler
    assert not driver.alive


def abort_in_a_pause(driver):
    driver.pause(PauseScope.ALL)
    abort(driver)
    driver.pause(PauseScope.NEW)
    driver.drain()


ACTIONS = {
    "abort": abort,
    "finish": finish,
    "shut down": shut_down,
    "pause all": partial(pause, scope=PauseScope.ALL),
    "pause new": partial(pause, scope=PauseScope.NEW),
    "abort in a pause": abort_in_a_pause,
}


@pytest.mark.costly
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("out", [False, True], ids=["settled", "a plan is out"])
@pytest.mark.parametrize("where", WAYS, ids=lambda where: where.name)
def test_every_operation_on_a_request_is_correct_in_every_status(where, out, action):
    driver = WAYS[where]()
    assert status(driver) is where
    if out and not driver.num_out:
        driver.schedule()
    ACTIONS[action](driver)
    if action != "shut down":
        driver.drain()
        driver.reset()
        assert driver.scheduler.reset_prefix_cache()


def test_a_request_that_waits_at_a_gate_does_not_delay_other_requests():
    driver = make_driver(holds=True)
    driver.add(request("r", seed=HELD))
    driver.add(request("behind"))
    for _ in range(4):
        step(driver)
    assert set(driver.alive) == {"r"} and status(driver) is S.WAITING_FOR_FSM
    driver.open_gate("r")
    step(driver)
    assert status(driver) is S.RUNNING


def test_a_gate_that_fails_ends_its_request_with_a_message():
    driver = make_driver(holds=True)
    driver.add(request("r", seed=HELD))
    driver.open_gate("r", fails=True)
    driver.schedule()
    (ending,) = driver.settle().finished
    assert (ending.request_id, ending.reason) == ("r", "error")
    assert ending.message == "requested failure: r"


def test_a_preempted_request_is_not_checked_by_gates_again():
    driver = make_driver(num_blocks=8, holds=True)
    driver.add(request("r", 11, max_tokens=8, seed=HELD, first=15))
    driver.add(request("other", 11, max_tokens=8))
    step(driver)
    driver.open_gate("r")
    while status(driver) is not S.PREEMPTED:
        step(driver)
    assert not driver.holds.gate.held
    driver.drain()


def test_a_request_that_waits_for_remote_kvs_has_no_batch_slot_and_does_not_delay_other_requests():
    driver = waits_for_remote_kvs()
    assert driver.scheduler.depth().num_running == 0
    driver.add(request("behind", first=11))
    driver.schedule()
    assert [join.request_id for join in driver.plans[-1].joins] == ["behind"]
    driver.drain()


def test_started_requests_finish_during_a_pause_of_new_requests():
    driver = make_driver(num_blocks=8)
    driver.add(request("a", 11, max_tokens=8))
    driver.add(request("r", 11, max_tokens=8, first=15))
    step(driver)
    driver.pause(PauseScope.NEW)
    driver.add(request("new"))
    while driver.scheduler.depth().num_active:
        step(driver)  # r is preempted and admitted again
    assert set(driver.alive) == {"new"}
    assert driver.scheduler.depth().num_paused == 1
    driver.drain()


def test_a_new_pause_scope_replaces_the_previous_one():
    driver = make_driver()
    driver.add(request("r"))
    driver.pause(PauseScope.NEW)
    driver.pause(PauseScope.ALL)
    step(driver)
    driver.pause(PauseScope.NEW)
    step(driver)
    assert status(driver) is S.WAITING
    driver.resume()
    step(driver)
    assert status(driver) is S.RUNNING
