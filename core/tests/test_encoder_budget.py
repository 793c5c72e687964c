"""The encoder budget of a step: limits, sharing and rollback, separately and in the scheduler."""

from dataclasses import replace

import pytest

from dovetail.clock import ManualClock
from dovetail.errors import RequestError
from dovetail.interfaces import Denied, Policy, Run, SchedulerContext, SchedulerLimits
from dovetail.plan import StepBuilder
from dovetail.request import EncoderInput, Request
from dovetail.scheduling import Scheduler
from dovetail.scheduling.encoder_budget import EncoderBudget
from dovetail_devkit.scheduler.playing import play
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import make_kv_cache, random_program
from dovetail_devkit.suites.scheduler import make_request

LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=32,
    max_num_encoder_tokens=6,
    encoder_cache_tokens=10,
)


def content(*indexes):
    """Return encoder inputs. Each argument is (position, size, name)."""
    return tuple(
        EncoderInput(position=position, num_tokens=size, content_hash=name.encode())
        for position, size, name in indexes
    )


def requested(name, *indexes, num_prompt=12):
    return replace(make_request(name, range(num_prompt)), encoder_inputs=content(*indexes))


def request(name, *indexes, row=0):
    new_request = Request(requested(name, *indexes), max_model_len=32)
    new_request.row = row
    return new_request


def emit(budget):
    builder = StepBuilder()
    budget.emit(builder)
    plan = builder.build()
    return [(run.row, run.index) for run in plan.encoder], list(plan.encoder_frees)


@pytest.fixture
def budget():
    return EncoderBudget(LIMITS)


def test_a_prompt_chunk_ends_before_an_encoder_input_that_exceeds_the_budget(budget):
    first = request("a", (2, 4, "x"), (7, 4, "y"))
    assert budget.reach(first, 0, 12) == 7  # 4 + 4 embeddings exceed the budget of 6
    assert budget.reach(first, 0, 2) == 2
    assert budget.reach(first, 7, 12) == 12
    other = request("b", (0, 3, "z"), row=1)
    budget.want(first, 0, 7)
    assert budget.reach(other, 0, 5) == 0
    budget.revoke(first)
    assert budget.reach(other, 0, 5) == 5


def test_equal_encoder_inputs_are_encoded_and_counted_once(budget):
    first, other = request("a", (0, 4, "x")), request("b", (3, 4, "x"), row=1)
    budget.want(first, 0, 6)
    assert budget.reach(other, 0, 9) == 9
    budget.want(other, 0, 9)
    assert emit(budget) == ([(0, 0)], [])


def test_the_least_recently_used_encoder_output_is_freed_when_space_is_needed(budget):
    for row, name in enumerate("xyz"):
        first = request(name, (0, 4, name), row=row)
        assert budget.reach(first, 0, 6) == 6
        budget.want(first, 0, 6)
        frees = [b"x"] if name == "z" else []  # 12 embeddings exceed the size 10
        assert emit(budget) == ([(row, 0)], frees)


def test_encoder_outputs_in_use_are_never_freed(budget):
    held = [request(name, (0, 5, name), row=row) for row, name in enumerate("xy")]
    for item in held:
        budget.want(item, 0, 2)  # the run has two of five placeholders
        emit(budget)
    late = request("z", (1, 3, "z"), row=2)
    assert budget.reach(late, 0, 9) == 1
    budget.free(held[0])  # the request was preempted
    assert budget.reach(late, 0, 9) == 9
    budget.want(late, 0, 9)
    assert emit(budget) == ([(2, 0)], [b"x"])
    budget.check_integrity([held[1], late])


def test_cached_encoder_outputs_that_a_step_needs_are_not_freed_in_that_step(budget):
    for row, name in enumerate("xy"):
        budget.want(request(name, (0, 4, name), row=row), 0, 6)
        emit(budget)
    budget.want(request("new", (0, 6, "z"), row=2), 0, 6)
    budget.want(request("again", (0, 4, "x"), row=3), 0, 6)
    assert emit(budget) == ([(2, 0)], [b"y"])


@pytest.mark.parametrize(("sizes", "chunks"), [([7], True), ([4, 4], False)])
def test_requests_with_encoder_inputs_that_can_never_be_encoded_are_rejected(sizes, chunks):
    indexes, position = [], 0
    for size in sizes:
        indexes.append((position, size, str(position)))
        position += size
    scheduler = Scheduler(
        SchedulerContext(
            limits=replace(LIMITS, enable_chunked_prefill=chunks),
            kv_cache=make_kv_cache(num_blocks=20, block_size=4),
            clock=ManualClock(),
        )
    )
    with pytest.raises(RequestError, match="encoder tokens"):
        scheduler.add_request(requested("a", *indexes))
    assert scheduler.depth().num_waiting == 0


def test_a_policy_receives_the_reason_for_a_denied_action():
    results = []

    class RunsOneRequest(Policy):
        def plan(self, view):
            for item in (*view.running, *view.waiting):
                if view.num_uncomputed_tokens(item):
                    results.append((yield Run(item)))

    scheduler = Scheduler(
        SchedulerContext(
            limits=LIMITS,
            kv_cache=make_kv_cache(num_blocks=20, block_size=4),
            clock=ManualClock(),
            policy=RunsOneRequest,
            strict=True,
        )
    )
    scheduler.add_request(requested("a", (0, 6, "x"), num_prompt=8))
    scheduler.add_request(requested("b", (0, 6, "y"), num_prompt=8))
    scheduler.schedule()
    assert results[0].num_tokens == 8
    assert results[1].denied is Denied.ENCODER


@pytest.mark.costly
def test_random_scheduler_calls_with_encoder_inputs_follow_the_contract():
    num_encoded = num_freed = 0
    for seed in range(20):
        program = random_program(seed, plain=True)
        limits = replace(
            program.limits, max_num_encoder_tokens=3 + seed % 4, encoder_cache_tokens=4 + seed % 5
        )
        driver = SchedulerDriver(
            Scheduler, replace(program, limits=limits), after_step=Scheduler.check_integrity
        )
        play(driver.program, driver)
        num_encoded += sum(len(plan.encoder) for plan in driver.plans)
        num_freed += sum(len(plan.encoder_frees) for plan in driver.plans)
    assert num_encoded > 200 and num_freed > 100
