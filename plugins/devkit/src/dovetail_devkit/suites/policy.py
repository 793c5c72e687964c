"""The conformance suite of the policy contract, for any policy with the core's scheduler.

The scheduler suite runs its programs with the policy, and checks which attributes the policy reads,
its ranks, victims and actions. Further cases check that the policy does not depend on future
tokens, and that the scheduler's inlined loop creates the same plans as the default `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import SchedulerInterface
from dovetail.scheduling import Scheduler
from dovetail_devkit.case import Case, run_all
from dovetail_devkit.expectation import SkipCase, checking, expect
from dovetail_devkit.policy.foresight import check_foresight
from dovetail_devkit.policy.programs import (
    check_few_batch_slots,
    check_newcomer,
    check_room_for_all,
    make_driver,
)
from dovetail_devkit.policy.watch import WatchedPolicy, plans, watch
from dovetail_devkit.scheduler.program import SchedulerDriver, random_program
from dovetail_devkit.suites.scheduler import check_program, scheduler_cases

NUM_PROGRAMS = 24
NUM_TWICE = 6
"""Number of programs that run with both `plan` and the scheduler's inlined loop."""


@checking("policy")
def check_policy(policy_cls: type[Policy], *, num_programs: int = NUM_PROGRAMS) -> None:
    """Check a policy against its contract. Raise AssertionError with the violated rule."""
    for case in policy_cases(policy_cls, num_programs=num_programs):
        try:
            run_all([case])
        except SkipCase:
            continue


def policy_cases(policy_cls: type[Policy], *, num_programs: int = NUM_PROGRAMS) -> Iterator[Case]:
    """Yield the suite's cases: declarations, and the scheduler suite with this policy."""
    yield Case(name="declarations", run=partial(_check_declarations, policy_cls))
    yield Case(name="enough batch slots", run=partial(_check_room, policy_cls))
    yield Case(name="too few batch slots", run=partial(_check_batch_slots, policy_cls))
    yield Case(name="one newcomer", run=partial(_check_one_newcomer, policy_cls))
    yield Case(name="no foresight", run=partial(check_foresight, Scheduler, watch(policy_cls)))
    yield Case(name="inlined loop", run=partial(_check_both_ways, policy_cls))
    yield from scheduler_cases(
        Scheduler,
        policy=watch(policy_cls),
        keeps_prefixes=True,
        num_programs=num_programs,
        after_step=_check_after_step,
    )


def _check_declarations(policy_cls: type[Policy]) -> None:
    for name in ("static_rank", "preempts", "work_conserving"):
        value = getattr(policy_cls, name)
        expect(isinstance(value, bool), f"{name} is {value!r}; it must be True or False")


def _check_room(policy_cls: type[Policy]) -> None:
    if not policy_cls.work_conserving:
        raise SkipCase(
            "the policy declares work_conserving = False, so it may leave batch slots free"
        )
    driver, policy = _make(policy_cls)
    check_room_for_all(driver, policy.accounts)


def _check_batch_slots(policy_cls: type[Policy]) -> None:
    driver, policy = _make(policy_cls)
    check_few_batch_slots(driver, policy.accounts, policy)


def _check_one_newcomer(policy_cls: type[Policy]) -> None:
    if plans(policy_cls):
        raise SkipCase("the policy overrides `plan`, so it may preempt several requests")
    driver, policy = _make(policy_cls, depth=2)
    check_newcomer(driver, policy.accounts, policy)


def _check_both_ways(policy_cls: type[Policy]) -> None:
    """Check that the scheduler's inlined loop creates the same plans as the default `plan`."""
    if plans(policy_cls):
        raise SkipCase("the policy overrides `plan`, so the inlined loop is not used")
    for seed in range(NUM_TWICE):
        program = random_program(seed, plain=True)
        ways = [
            check_program(Scheduler, program, policy=policy, after_step=_check_after_step)
            for policy in (watch(policy_cls), watch(policy_cls, by_plan=True))
        ]
        expect(
            ways[0] == ways[1],
            f"the plans of the scheduler's inlined loop differ from the plans of the default "
            f"`plan`. {program}",
        )


def _make(policy_cls: type[Policy], *, depth: int = 1) -> tuple[SchedulerDriver, WatchedPolicy]:
    driver = make_driver(watch(policy_cls), _check_after_step, depth=depth)
    return driver, cast("WatchedPolicy", cast("Scheduler", driver.scheduler).policy)


def _check_after_step(scheduler: SchedulerInterface) -> None:
    core = cast("Scheduler", scheduler)
    core.check_integrity()
    cast("WatchedPolicy", core.policy).check_waiting()
