"""The scheduler suite detects starvation, blocks shared by all groups, and wrong column types."""

from array import array
from collections import deque
from dataclasses import replace

import pytest
from conformance.messages import expect_rule_first

from dovetail.errors import ConfigError
from dovetail.interfaces import Policy
from dovetail.kv_cache.kinds import CacheKind
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.scheduler import FakeScheduler
from dovetail_devkit.suites.policy import check_policy
from dovetail_devkit.suites.scheduler import check_scheduler


class AdmitsTheNewest(FakeScheduler):
    """Admits the newest requests first."""

    def _can_admit(self, request):
        self._waiting.rotate(1)
        self._waiting.appendleft(self._waiting.popleft())
        return super()._can_admit(self._waiting[0])


class RunsTheNewest(FakeScheduler):
    """Runs only the last admitted request while it has tokens to run."""

    def _next(self):
        self._running.reverse()
        actual = super()._next()
        self._running = deque(sorted(self._running, key=lambda request: self._order(request)))
        return actual

    def _order(self, request):
        return list(self._requests).index(request.request_id)


class NewestFirst(Policy):
    """Ranks the newest request first."""

    def rank(self, request, view):
        return -request.sequence


class PreemptsForTheNewest(NewestFirst):
    """Ranks the newest request first and preempts older requests."""

    preempts = True


class OneTableForAllGroups(FakeScheduler):
    """Gives every KV-cache group the same blocks."""

    def _admit(self, request):
        groups, self._groups = self._groups, self._groups[:1]
        builder, self._builder = self._builder, _ForAll(self._builder, len(groups))
        super()._admit(request)
        self._groups, self._builder = groups, builder

    def _num_blocks(self, request):
        return -(-request.max_total_tokens // self._groups[0].spec.block_size)


class _ForAll:
    """A plan builder that gives all groups the first group's blocks."""

    def __init__(self, builder, num_groups):
        self._builder, self._num_groups = builder, num_groups

    def join(self, request):
        self._builder.join(request)

    def grow(self, row, blocks, group):
        for item in range(self._num_groups):
            self._builder.grow(row, blocks, group=item)


def planning(**columns):
    """Return a scheduler that changes columns of its plans."""

    class Mutant(FakeScheduler):
        def schedule(self):
            plan = super().schedule()
            return replace(plan, **{name: make(plan) for name, make in columns.items()})

    return Mutant


def scheduler_with_columns(**columns):
    """Return a scheduler that changes columns of its outputs."""

    class Mutant(FakeScheduler):
        def update_from_output(self, plan, output):
            report = super().update_from_output(plan, output)
            return replace(report, **{name: make(report) for name, make in columns.items()})

    return Mutant


TYPE_MUTANTS = {
    "EngineCoreOutputs.token_ids is list": scheduler_with_columns(
        token_ids=lambda o: list(o.token_ids)
    ),
    "EngineCoreOutputs.num_new_tokens .*array\\('q'\\)": scheduler_with_columns(
        num_new_tokens=lambda o: array("q", o.num_new_tokens)
    ),
    "EngineCoreOutputs.request_ids is tuple": scheduler_with_columns(
        request_ids=lambda o: (*o.request_ids,)
    ),
    "EngineCoreOutputs.finished is list": scheduler_with_columns(finished=lambda o: [*o.finished]),
    "EngineCoreOutputs.num_cached_tokens .* str to float": scheduler_with_columns(
        num_cached_tokens=lambda o: {name: 0.0 for name in o.request_ids}
    ),
    "SchedulerOutput.rows is list": planning(rows=lambda p: list(p.rows)),
    "SchedulerOutput.samples .*array\\('i'\\)": planning(samples=lambda p: array("i", p.samples)),
    "SchedulerOutput.joins is list": planning(joins=lambda p: list(p.joins)),
    "NewRequest.token_ids is tuple": planning(
        joins=lambda p: tuple(replace(join, token_ids=(*join.token_ids,)) for join in p.joins)
    ),
    "BlockColumns.block_ids is list": planning(
        blocks=lambda p: tuple(
            replace(block, block_ids=list(block.block_ids)) for block in p.blocks
        )
    ),
    "SchedulerOutput.total_num_tokens is bool": planning(total_num_tokens=lambda p: False),
}


@pytest.mark.parametrize("rule", TYPE_MUTANTS)
def test_a_plan_column_of_a_wrong_type_is_detected(rule):
    with pytest.raises(AssertionError, match=rule) as actual:
        check_scheduler(TYPE_MUTANTS[rule])
    expect_rule_first(actual.value)


@pytest.mark.parametrize(
    ("mutant", "shortage"),
    [(AdmitsTheNewest, "batch slots"), (RunsTheNewest, "tokens|batch slots")],
)
def test_a_scheduler_that_starves_the_oldest_request_is_detected(mutant, shortage):
    with pytest.raises(
        AssertionError, match=f"requests starve when there are not enough ({shortage})"
    ):
        check_scheduler(mutant)


@pytest.mark.parametrize("policy", [NewestFirst, PreemptsForTheNewest])
def test_a_policy_that_starves_the_oldest_request_is_detected(policy):
    with pytest.raises(
        AssertionError, match="requests starve when there are not enough batch slots"
    ):
        check_scheduler(Scheduler, policy=policy)


@pytest.mark.costly
def test_the_policy_suite_detects_starvation():
    with pytest.raises(
        AssertionError, match="requests starve when there are not enough batch slots"
    ):
        check_policy(NewestFirst)


def test_a_scheduler_that_gives_all_groups_the_same_blocks_is_detected():
    with pytest.raises(
        AssertionError, match="the KV-cache groups 0 and 1 both have block"
    ) as actual:
        check_scheduler(OneTableForAllGroups)
    expect_rule_first(actual.value)


def test_a_scheduler_that_frees_a_block_inside_the_sliding_window_is_detected(monkeypatch):
    right = CacheKind.first_needed
    early = lambda self, num_tokens: right(self, num_tokens + self.span)  # noqa: E731
    monkeypatch.setattr(CacheKind, "first_needed", early)
    with pytest.raises(AssertionError, match=r"of group \d from block"):
        check_scheduler(Scheduler)


def test_a_scheduler_that_rejects_several_cache_groups_is_not_tested_with_them():
    class OneGroupOnly(OneTableForAllGroups):
        def __init__(self, context):
            if len(context.kv_cache.groups) > 1:
                raise ConfigError("one KV-cache group only")
            super().__init__(context)

    check_scheduler(OneGroupOnly, num_programs=2)
