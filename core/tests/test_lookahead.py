"""Draft tokens in the scheduler: their counts, lookahead blocks and results."""

from array import array
from dataclasses import replace

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.core import EngineCore
from dovetail.interfaces import Ready, SchedulerContext, SchedulerLimits
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.scheduling import Scheduler
from dovetail_devkit.rows.model import RowModel
from dovetail_devkit.scheduler.playing import play
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import make_kv_cache, random_program
from dovetail_devkit.suites.scheduler import make_request

LIMITS = SchedulerLimits(
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, num_lookahead_tokens=3
)


class Table:
    """A scheduler for which the test provides the step results."""

    def __init__(self, *, num_blocks=30, **limits):
        context = SchedulerContext(
            limits=replace(LIMITS, **limits),
            kv_cache=make_kv_cache(num_blocks=num_blocks, block_size=2),
            clock=ManualClock(),
        )
        self.scheduler = Scheduler(context)

    def add(self, name, num_prompt=4, *, max_tokens=9, stop=()):
        prompt = [ord(name) * 100 + index for index in range(num_prompt)]
        requested = make_request(name, prompt, max_tokens=max_tokens)
        self.scheduler.add_request(replace(requested, stop_token_ids=frozenset(stop)))

    def plan(self):
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return plan

    def settle(self, plan, sampled, drafts=(), **columns):
        """Process a result. sampled: the tokens of each request. drafts: new drafts by row."""
        output = ModelRunnerOutput(
            step_id=plan.step_id,
            num_sampled=array("B", map(len, sampled)),
            token_ids=array("i", [token for run in sampled for token in run]),
            num_drafts=array("B", drafts),
            **columns,
        )
        outputs = self.scheduler.update_from_output(plan, output)
        self.scheduler.check_integrity()
        return outputs

    def request(self, name):
        return self.scheduler._state.requests[name]


def runs(plan):
    drafts = list(plan.num_drafts) or [0] * len(plan.rows)
    return list(zip(plan.starts, plan.num_tokens, plan.samples, drafts, strict=True))


def test_drafts_are_verified_in_the_next_step_of_the_request():
    table = Table()
    table.add("a")
    first = table.plan()
    assert runs(first) == [(0, 4, 1, 0)] and not first.num_drafts
    table.settle(first, [[50]], [2])
    second = table.plan()
    assert runs(second) == [(4, 3, 1, 2)]
    outputs = table.settle(second, [[51, 52]], [0])  # one of two drafts was accepted
    assert list(outputs.token_ids) == [51, 52]
    assert runs(table.plan()) == [(6, 1, 1, 0)]
    assert (outputs.stats.num_drafts, outputs.stats.num_accepted) == (2, 1)


def test_the_next_step_of_a_request_begins_after_the_accepted_drafts():
    for sampled, start in (([51, 52, 53, 54], 8), ([51], 5)):
        table = Table()
        table.add("a")
        table.settle(table.plan(), [[50]], [3])
        table.settle(table.plan(), [sampled], [1])
        assert runs(table.plan()) == [(start, 2, 1, 1)]


def test_the_next_step_is_planned_before_the_drafts_are_verified():
    table = Table(num_blocks=40, max_model_len=40)
    table.add("a", max_tokens=30)
    table.settle(table.plan(), [[50]], [2])
    first = table.plan()
    second, third = table.plan(), table.plan()
    assert runs(first) == [(4, 3, 1, 2)]
    # The plan assumes that all drafts are accepted and has blocks for the maximum number.
    assert runs(second) == [(7, 4, 1, 3)] and runs(third) == [(11, 4, 1, 3)]
    assert table.request("a").num_in_flight == 3 + 4 + 4
    table.settle(first, [[51]], [1])  # both drafts rejected: the next run begins two tokens earlier
    request = table.request("a")
    assert (request.num_tokens, request.num_in_flight) == (6, 8)
    assert request.num_computed_tokens == 13
    outputs = table.settle(second, [[52, 53]], [0])  # the draft of this run was accepted
    assert (outputs.stats.num_drafts, outputs.stats.num_accepted) == (3, 1)
    assert runs(table.plan()) == [(11, 4, 1, 3)]
    table.settle(third, [[54]], [3])
    assert request.num_tokens == 9 and request.num_computed_tokens == 12


def test_a_preempted_request_waits_for_all_results_in_flight():
    table = Table(num_lookahead_tokens=0)
    table.add("a")
    table.settle(table.plan(), [[50]])
    out = [table.plan() for _ in range(3)]
    scheduler, request, later = table.scheduler, table.request("a"), []
    scheduler._mechanism.begin_step()
    scheduler._mechanism.evict(request)
    for index, plan in enumerate(list(out)):
        assert request.num_in_flight == 3 - index
        waiting = table.plan()
        assert waiting.empty and not waiting.joins
        table.settle(plan, [[60 + index]])
        later.append(waiting)
    for waiting in later:
        table.settle(waiting, [])
    assert request.num_in_flight == 0
    back = table.plan()
    assert list(back.joins[0].token_ids[-4:]) == [50, 60, 61, 62]


@pytest.mark.parametrize(
    ("budget", "max_tokens", "num_drafts"),
    [(16, 9, 3), (4, 9, 3), (4, 4, 2), (4, 2, 0), (16, 3, 1)],
)
def test_token_budget_and_length_limit_the_number_of_drafts(budget, max_tokens, num_drafts):
    table = Table(max_num_batched_tokens=budget)
    table.add("a", max_tokens=max_tokens)
    table.settle(table.plan(), [[50]], [3])
    assert runs(table.plan()) == [(4, 1 + num_drafts, 1, num_drafts)]


def test_the_token_budget_limits_the_drafts_of_a_second_request():
    table = Table(max_num_batched_tokens=8)
    for name in "ab":
        table.add(name)
    table.settle(table.plan(), [[50], [60]], [3, 3])
    assert runs(table.plan()) == [(4, 4, 1, 3), (4, 4, 1, 3)]
    table = Table(max_num_batched_tokens=9)
    table.add("a", 3)
    table.add("b", 3)
    table.add("c", 3)
    table.settle(table.plan(), [[50], [60], [70]], [3, 3, 3])
    assert runs(table.plan()) == [(3, 4, 1, 3), (3, 4, 1, 3), (3, 1, 1, 0)]


def test_a_stop_token_within_accepted_drafts_drops_the_later_drafts():
    table = Table()
    table.add("a", stop=[52])
    table.settle(table.plan(), [[50]], [3])
    logprobs = LogprobColumns(
        counts=array("i", [1] * 4),
        token_ids=array("i", [51, 52, 53, 54]),
        logprobs=array("f", [-1.0] * 4),
        ranks=array("i", [1] * 4),
    )
    outputs = table.settle(table.plan(), [[51, 52, 53, 54]], [3], logprobs={0: logprobs})
    assert list(outputs.token_ids) == [51, 52]
    assert list(outputs.logprobs["a"].token_ids) == [51, 52]
    assert [ended.reason for ended in outputs.finished] == ["stop"]
    assert table.scheduler.depth().num_active == 0
    assert table.scheduler.reset_prefix_cache()


def test_the_length_limit_within_accepted_drafts_drops_the_later_drafts():
    table = Table()
    table.add("a", max_tokens=3)
    table.settle(table.plan(), [[50]], [3])
    plan = table.plan()
    assert runs(plan) == [(4, 2, 1, 1)]
    outputs = table.settle(plan, [[51, 52]], [3])
    assert [ended.reason for ended in outputs.finished] == ["length"]


def test_lookahead_blocks_end_at_the_length_limit_of_the_request():
    table = Table()
    table.add("a", 4, max_tokens=20)
    table.add("b", 4, max_tokens=2)
    table.settle(table.plan(), [[50], [60]], [0, 0])
    assert table.request("a").capacity >= 4 + 3
    assert table.request("b").capacity == 6  # no block is beyond the length limit
    table.settle(table.plan(), [[51], [61]], [0, 0])
    assert table.request("a").capacity >= 5 + 3


def test_a_preempted_request_loses_its_drafts():
    table = Table()
    table.add("a")
    table.settle(table.plan(), [[50]], [3])
    request = table.request("a")
    table.scheduler._mechanism.begin_step()
    table.scheduler._mechanism.evict(request)
    assert request.num_tokens_with_pending == request.num_tokens == 5
    plan = table.plan()
    assert sum(plan.num_drafts) == 0 and plan.joins[0].token_ids[-1] == 50


def test_only_verified_tokens_are_committed():
    """A block with a draft is never cached before it is verified."""
    table = Table()
    table.add("a", 4)
    table.settle(table.plan(), [[50]], [3])
    table.plan()  # this plan verifies positions 5 to 7
    request = table.request("a")
    assert request.num_computed_tokens == 8 and request.num_committed_blocks == 2


class RowExecutor:
    """An executor that computes steps with `RowModel` and counts empty plans."""

    def __init__(self, limits, kv_cache, depth):
        self.max_concurrent_steps, self.num_empty = depth, 0
        self.model = RowModel(limits, kv_cache, vocab_size=31)

    def execute_model(self, plan):
        self.num_empty += plan.empty
        self.model.execute(plan)
        return Ready(None)

    def sample_tokens(self, grammar=None):
        return Ready(self.model.sample(grammar))


def generate(num_lookahead_tokens, depth):
    """Run six requests. Return the tokens, the number of steps and the number of empty plans."""
    limits = replace(LIMITS, num_lookahead_tokens=num_lookahead_tokens)
    kv_cache = make_kv_cache(num_blocks=80, block_size=2)
    context = SchedulerContext(limits=limits, kv_cache=kv_cache, clock=ManualClock())
    executor = RowExecutor(limits, kv_cache, depth)
    core = EngineCore(executor, Scheduler(context), vocab_size=31, max_model_len=32)
    for row in range(6):
        core.add_request(make_request(f"r{row}", [row, 7, row], max_tokens=28))
    tokens, num_steps = {}, 0
    while core.has_work():
        num_steps += 1
        outputs = core.step() if depth == 1 else core.step_with_batch_queue()
        if outputs is None:
            continue
        end = 0
        for name, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
            tokens.setdefault(name, []).extend(outputs.token_ids[end : end + count])
            end += count
    return tokens, num_steps, executor.num_empty


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_an_engine_gives_the_same_tokens_with_drafts_in_fewer_steps(depth):
    plain, num_plain_steps, _ = generate(0, 1)
    drafted, num_steps, num_empty = generate(3, depth)
    assert drafted == plain
    assert num_empty <= 2 * depth and (depth > 2 or num_steps < num_plain_steps)


@pytest.mark.costly
def test_tokens_are_the_same_with_and_without_drafts():
    """`SchedulerDriver` compares the tokens of each request with a run of that request alone."""
    num_verified = 0
    for seed in range(24):
        program = random_program(seed, plain=True)
        limits = replace(program.limits, num_lookahead_tokens=1 + seed % 4)
        driver = SchedulerDriver(
            Scheduler, replace(program, limits=limits), after_step=Scheduler.check_integrity
        )
        play(driver.program, driver)
        num_verified += driver.drafts.num_verified
    assert num_verified > 500
