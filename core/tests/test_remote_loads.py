"""Remote keys and values: synchronous, asynchronous and failed loads, aborts and stores."""

from array import array
from collections import Counter
from dataclasses import replace

import pytest

from dovetail.interfaces import Policy, SchedulerLimits
from dovetail.request import EngineCoreRequest, RequestStatus
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit.scheduler.playing import play
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import Program, make_kv_cache, random_program

LIMITS = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=40)
BLOCKS = 3
PROMPT = BLOCKS * 4 + 1


def request(name, first=0, max_tokens=3):
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=array("i", [(first + index) % 31 for index in range(PROMPT)]),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
    )


@pytest.fixture(params=[True, False], ids=["chunked", "whole"])
def driver(request):
    limits = replace(LIMITS, enable_chunked_prefill=request.param)
    kv_cache = make_kv_cache(num_blocks=20, block_size=4)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=2, connected=True)
    return make_driver(program)


def make_driver(program):
    driver = SchedulerDriver(Scheduler, program, after_step=Scheduler.check_integrity)
    driver._rows._side.loses_one_in = 0
    return driver


def fill(driver, *, loads=0):
    """Store a prompt and load it the given number of times. No block stays in the cache."""
    for turn in range(1 + loads):
        driver.add(request(f"before-{turn}"))
        driver.drain()
        driver.reset()


def lose(driver, number):
    """Make a load fail: the worker side has lost a block of the prompt."""
    kept = driver._rows._side.kept
    del kept[list(kept)[number]]


def test_a_synchronous_load_runs_in_the_same_plan(driver):
    fill(driver)
    driver.add(request("a"))
    plan = driver.schedule()
    assert list(plan.starts) == [PROMPT - 1] and plan.kv_transfer
    driver.drain()
    assert driver.num_cached["a"] == PROMPT - 1


def test_a_request_with_an_asynchronous_load_holds_blocks_but_no_batch_slot(driver):
    fill(driver, loads=1)
    driver.add(request("a"))
    plan = driver.schedule()
    assert plan.empty and not plan.joins and plan.kv_transfer
    depth = driver.scheduler.depth()
    assert (depth.num_waiting, depth.num_running, depth.num_transfers) == (1, 0, 1)
    (held,) = driver.scheduler._state.loads
    assert len(held.blocks[0]) == BLOCKS + 1
    driver.settle()
    plan = driver.schedule()
    assert list(plan.starts) == [PROMPT - 1]
    driver.drain()
    assert driver.num_cached["a"] == PROMPT - 1


@pytest.mark.parametrize("loads", [0, 1], ids=["at once", "later"])
def test_the_blocks_of_a_failed_load_are_computed(driver, loads):
    fill(driver, loads=loads)
    lose(driver, 1)
    driver.add(request("a"))
    driver.drain()  # `SchedulerDriver` checks the tokens
    remote = driver.scheduler._state.loads._remote
    assert remote.num_failed_loads == 1
    assert driver.num_cached["a"] == 4  # only the block before the lost block is valid


def test_step_results_computed_from_a_failed_load_are_dropped(driver):
    """At depth 2, two plans have used the load before its failure is known."""
    fill(driver)
    lose(driver, 0)
    driver.add(request("a"))
    driver.schedule()
    driver.schedule()
    assert not driver.settle().request_ids
    assert driver.scheduler.depth().num_running == 0
    driver.schedule()
    assert not driver.settle().request_ids
    driver.drain()


def test_an_abort_keeps_the_blocks_of_a_running_load(driver):
    fill(driver, loads=1)
    driver.add(request("a"))
    driver.schedule()
    free = driver.scheduler.view.num_free_blocks
    driver.abort(["a"])
    # the three blocks of the load are not free yet
    assert driver.scheduler.view.num_free_blocks == free + 1
    assert driver.scheduler.depth().num_transfers == 1
    driver.settle()
    assert driver.scheduler.depth().num_transfers == 0
    assert driver.scheduler.view.num_free_blocks == 19


def test_blocks_of_a_finished_request_are_stored_before_reuse(driver):
    driver.add(request("a", max_tokens=1))
    driver.schedule()
    driver.settle()
    assert not driver.alive and driver.scheduler.depth().num_transfers
    assert driver.scheduler.view.num_free_blocks == 19 - BLOCKS
    assert not driver.scheduler.reset_prefix_cache()
    driver.drain()
    assert driver.scheduler.view.num_free_blocks == 19


def test_a_request_with_loaded_blocks_is_admitted_before_other_waiting_requests():
    limits = replace(LIMITS, max_num_seqs=1)
    kv_cache = make_kv_cache(num_blocks=20, block_size=4)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, connected=True)
    driver = make_driver(program)
    fill(driver, loads=1)
    driver.add(request("loading"))
    driver.schedule()
    driver.settle()
    loaded = driver.scheduler._state.requests["loading"]
    assert loaded.status is RequestStatus.WAITING and loaded.blocks
    driver.add(request("first in the queue", first=9))
    (join,) = driver.schedule().joins
    assert join.request_id == "loading"
    driver.settle()
    driver.drain()


@pytest.mark.costly
def test_random_scheduler_calls_with_a_failing_connector_follow_the_contract():
    counted = Counter()
    for seed in range(20):
        program = replace(random_program(seed, plain=True), connected=True, depth=1 + seed % 2)
        limits = replace(program.limits, enable_prefix_caching=True)
        program = replace(program, limits=limits)
        driver = SchedulerDriver(Scheduler, program, after_step=Scheduler.check_integrity)
        play(program, driver)
        remote = driver.scheduler._state.loads._remote
        counted.update(
            loaded=remote.num_loaded_blocks,
            stored=remote.num_stored_blocks,
            failed=remote.num_failed_loads,
        )
    assert counted["loaded"] > 50 and counted["stored"] > 500 and counted["failed"] > 10


class Urgent(Policy):
    """A policy that preempts running requests to give their batch slots to urgent requests."""

    preempts = True

    def rank(self, request, view):
        return request.priority


def evict_while_its_load_fails():
    """Make the load of "a" fail after "b" has preempted "a". Return the driver and outputs."""
    limits = replace(LIMITS, max_num_seqs=1)
    kv_cache = make_kv_cache(num_blocks=20, block_size=4)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=2, connected=True)
    driver = SchedulerDriver(
        Scheduler, program, policy=Urgent, after_step=Scheduler.check_integrity
    )
    driver._rows._side.loses_one_in = 0
    fill(driver)
    lose(driver, 1)
    driver.add(request("a"))
    assert driver.schedule().kv_transfer
    driver.add(replace(request("b", first=7), priority=-1))
    driver.schedule()
    assert driver.scheduler._state.requests["a"].status is RequestStatus.PREEMPTED
    return driver, driver.settle()


def test_no_output_is_returned_for_a_request_evicted_while_its_load_fails():
    driver, outputs = evict_while_its_load_fails()
    assert not outputs.request_ids, "its token depends on a block that was never loaded"
    driver.drain()


def test_a_request_that_reuses_the_id_of_an_aborted_request_starts_without_its_state():
    driver, _ = evict_while_its_load_fails()
    driver.abort(["a"])
    driver.drain()
    driver.reset()
    driver.add(request("a"))
    assert driver.schedule().kv_transfer, "the load of the earlier request failed, not of this one"
    driver.drain()
