"""Priority: the order of priorities, preemption, and the conformance suites."""

from dataclasses import replace

import pytest

from dovetail.interfaces import SchedulerLimits
from dovetail_devkit.scheduler.program import Program, SchedulerDriver, make_kv_cache
from dovetail_devkit.suites.policy import check_policy
from dovetail_devkit.suites.scheduler import check_scheduler, make_request
from dovetail_sched_priority import PriorityPolicy, PriorityScheduler


def driver(max_num_seqs=1):
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=8, max_model_len=16)
    kv_cache = make_kv_cache(num_blocks=9, block_size=4)
    return SchedulerDriver(PriorityScheduler, Program(seed=0, limits=limits, kv_cache=kv_cache))


def asked(name, priority):
    return replace(make_request(name), priority=priority)


def play(game):
    order = []
    while game.alive:
        order += [request.request_id for request in game.schedule().joins]
        game.settle()
    return order


@pytest.mark.costly
def test_the_scheduler_meets_its_contract():
    check_scheduler(PriorityScheduler, num_programs=20)


@pytest.mark.costly
def test_the_policy_meets_its_contract():
    check_policy(PriorityPolicy, num_programs=10)


def test_the_lower_priority_number_is_served_first_and_ties_are_in_arrival_order():
    game = driver()
    for name, priority in (("a", 1), ("b", -1), ("c", 1), ("d", 0)):
        game.add(asked(name, priority))
    assert play(game) == ["b", "d", "a", "c"]


def test_a_request_preempts_a_request_of_lower_priority():
    game = driver()
    game.add(asked("low", 5))
    game.schedule()
    game.settle()
    game.add(asked("high", 0))
    assert play(game) == ["high", "low"]


def test_requests_of_equal_priority_are_not_preempted():
    game = driver()
    game.add(asked("first", 1))
    game.schedule()
    game.settle()
    game.add(asked("second", 1))
    assert play(game) == ["second"]
