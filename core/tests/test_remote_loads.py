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
from dovetail_devkit.scheduler.program import Referee
from dovetail_devkit.scheduler.random_programs import Program, make_kv_cache, random_program

LIMITS = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=40)
BLOCKS = 3
PROMPT = BLOCKS * 4 + 1


def request(name, first=0, max_tokens=3):
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=array("i", [(first + place) % 31 for place in range(PROMPT)]),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
    )


@pytest.fixture(params=[True, False], ids=["chunked", "whole"])
def referee(request):
    limits = replace(LIMITS, enable_chunked_prefill=request.param)
    kv_cache = make_kv_cache(num_blocks=20, block_size=4)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=2, connected=True)
    return make_referee(program)


def make_referee(program):
    referee = Referee(Scheduler, program, after_step=Scheduler.check_integrity)
    referee._rows._side.loses_one_in = 0
    return referee


def fill(referee, *, loads=0):
    """Store a prompt and load it the given number of times; no block stays in the cache."""
    for turn in range(1 + loads):
        referee.add(request(f"before-{turn}"))
        referee.drain()
        referee.reset()


def lose(referee, number):
    """Make a load fail: the worker side has lost a block of the prompt."""
    kept = referee._rows._side.kept
    del kept[list(kept)[number]]


def test_a_synchronous_load_runs_in_the_same_plan(referee):
    fill(referee)
    referee.add(request("a"))
    plan = referee.schedule()
    assert list(plan.starts) == [PROMPT - 1] and plan.kv_transfer
    referee.drain()
    assert referee.num_cached["a"] == PROMPT - 1


def test_an_asynchronous_load_holds_blocks_but_no_row(referee):
    fill(referee, loads=1)
    referee.add(request("a"))
    plan = referee.schedule()
    assert plan.empty and not plan.joins and plan.kv_transfer
    depth = referee.scheduler.depth()
    assert (depth.num_waiting, depth.num_running, depth.num_transfers) == (1, 0, 1)
    (held,) = referee.scheduler._state.loads
    assert len(held.blocks[0]) == BLOCKS + 1
    referee.settle()
    plan = referee.schedule()
    assert list(plan.starts) == [PROMPT - 1]
    referee.drain()
    assert referee.num_cached["a"] == PROMPT - 1


@pytest.mark.parametrize("loads", [0, 1], ids=["at once", "later"])
def test_the_blocks_of_a_failed_load_are_computed(referee, loads):
    fill(referee, loads=loads)
    lose(referee, 1)
    referee.add(request("a"))
    referee.drain()  # `Referee` checks the tokens
    remote = referee.scheduler._state.loads._remote
    assert remote.num_failed_loads == 1
    assert referee.num_cached["a"] == 4  # only the block before the lost block is valid


def test_step_results_computed_from_a_failed_load_are_dropped(referee):
    """At depth 2, two plans have used the load before its failure is known."""
    fill(referee)
    lose(referee, 0)
    referee.add(request("a"))
    referee.schedule()
    referee.schedule()
    assert not referee.settle().request_ids
    assert referee.scheduler.depth().num_running == 0
    referee.schedule()
    assert not referee.settle().request_ids
    referee.drain()


def test_an_abort_keeps_the_blocks_of_a_running_load(referee):
    fill(referee, loads=1)
    referee.add(request("a"))
    referee.schedule()
    free = referee.scheduler.view.num_free_blocks
    referee.abort(["a"])
    # the three blocks of the load are not free yet
    assert referee.scheduler.view.num_free_blocks == free + 1
    assert referee.scheduler.depth().num_transfers == 1
    referee.settle()
    assert referee.scheduler.depth().num_transfers == 0
    assert referee.scheduler.view.num_free_blocks == 19


def test_blocks_of_a_finished_request_are_stored_before_reuse(referee):
    referee.add(request("a", max_tokens=1))
    referee.schedule()
    referee.settle()
    assert not referee.alive and referee.scheduler.depth().num_transfers
    assert referee.scheduler.view.num_free_blocks == 19 - BLOCKS
    assert not referee.scheduler.reset_prefix_cache()
    referee.drain()
    assert referee.scheduler.view.num_free_blocks == 19


def test_a_loaded_request_is_the_next_to_be_admitted():
    limits = replace(LIMITS, max_num_seqs=1)
    kv_cache = make_kv_cache(num_blocks=20, block_size=4)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, connected=True)
    referee = make_referee(program)
    fill(referee, loads=1)
    referee.add(request("loading"))
    referee.schedule()
    referee.settle()
    loaded = referee.scheduler._state.requests["loading"]
    assert loaded.status is RequestStatus.WAITING and loaded.blocks
    referee.add(request("first in the queue", first=9))
    (join,) = referee.schedule().joins
    assert join.request_id == "loading"
    referee.settle()
    referee.drain()


def test_random_scheduler_calls_with_a_failing_connector_follow_the_contract():
    counted = Counter()
    for seed in range(20):
        program = replace(random_program(seed, plain=True), connected=True, depth=1 + seed % 2)
        limits = replace(program.limits, enable_prefix_caching=True)
        program = replace(program, limits=limits)
        referee = Referee(Scheduler, program, after_step=Scheduler.check_integrity)
        play(program, referee)
        remote = referee.scheduler._state.loads._remote
        counted.update(
            loaded=remote.num_loaded_blocks,
            stored=remote.num_stored_blocks,
            failed=remote.num_failed_loads,
        )
    assert counted["loaded"] > 50 and counted["stored"] > 500 and counted["failed"] > 10


class Urgent(Policy):
    """Urgent requests are served first and preempt a running request for its seat."""

    preempts = True

    def rank(self, request, view):
        return request.priority


def evict_while_its_load_fails():
    """Make the load of "a" fail after "b" has preempted "a"; return `Referee` and outputs."""
    limits = replace(LIMITS, max_num_seqs=1)
    kv_cache = make_kv_cache(num_blocks=20, block_size=4)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=2, connected=True)
    referee = Referee(Scheduler, program, policy=Urgent, after_step=Scheduler.check_integrity)
    referee._rows._side.loses_one_in = 0
    fill(referee)
    lose(referee, 1)
    referee.add(request("a"))
    assert referee.schedule().kv_transfer
    referee.add(replace(request("b", first=7), priority=-1))
    referee.schedule()
    assert referee.scheduler._state.requests["a"].status is RequestStatus.PREEMPTED
    return referee, referee.settle()


def test_no_output_is_returned_for_a_request_evicted_while_its_load_fails():
    referee, outputs = evict_while_its_load_fails()
    assert not outputs.request_ids, "its token depends on a block that was never loaded"
    referee.drain()


def test_a_request_with_the_id_of_an_aborted_one_starts_without_its_state():
    referee, _ = evict_while_its_load_fails()
    referee.abort(["a"])
    referee.drain()
    referee.reset()
    referee.add(request("a"))
    assert referee.schedule().kv_transfer, "the load of the earlier request failed, not of this one"
    referee.drain()
