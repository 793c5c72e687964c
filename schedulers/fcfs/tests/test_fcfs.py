"""First come, first served: the order of arrival, and the conformance suites."""

import pytest

from dovetail.interfaces import SchedulerLimits
from dovetail_devkit.scheduler.program import Program, SchedulerDriver, make_kv_cache
from dovetail_devkit.suites.policy import check_policy
from dovetail_devkit.suites.scheduler import check_scheduler, make_request
from dovetail_sched_fcfs import FCFSPolicy, FCFSScheduler


def driver(num_blocks=9, **limits):
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    return SchedulerDriver(
        FCFSScheduler,
        Program(
            seed=0,
            limits=SchedulerLimits(**(sizes | limits)),
            kv_cache=make_kv_cache(num_blocks=num_blocks, block_size=4),
        ),
    )


def joined(plan):
    return [request.request_id for request in plan.joins]


@pytest.mark.costly
def test_the_scheduler_meets_its_contract():
    check_scheduler(FCFSScheduler, num_programs=20)


@pytest.mark.costly
def test_the_policy_meets_its_contract():
    check_policy(FCFSPolicy, num_programs=10)


def test_requests_are_served_in_the_order_of_arrival():
    game = driver()
    for name in ("late", "early", "last"):
        game.add(make_request(name, max_tokens=2))
    assert joined(game.schedule()) == ["late", "early"]
    game.settle()
    game.schedule()
    game.settle()
    assert joined(game.schedule()) == ["last"]


def test_the_last_admitted_request_is_preempted_and_readmitted_first():
    game = driver(num_blocks=5)
    game.add(make_request("a", range(1, 7), max_tokens=8))
    game.add(make_request("b", range(11, 13), max_tokens=8))
    game.add(make_request("c", range(21, 23), max_tokens=1))
    order = []
    while game.alive:
        order += joined(game.schedule())
        game.settle()
    assert order.index("c") > 2
    assert order[:3] == ["a", "b", "b"]
