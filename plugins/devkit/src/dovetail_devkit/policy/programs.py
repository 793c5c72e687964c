"""Short sequences of scheduler calls that check a policy's order, with few or many batch slots.

The core's scheduler runs them with more blocks than needed, so that only the policy decides. The
checks use only the recorded events of the policy.
"""

from __future__ import annotations

from array import array

from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit.expectation import expect
from dovetail_devkit.policy.accounts import PolicyAccounts
from dovetail_devkit.scheduler.program import AfterStep, Program, SchedulerDriver, make_kv_cache

NUM_BATCH_SLOTS = 3
PRIORITIES = (2, 0, 1, 0, 2, -1, 1, -2, 0, 2, -1)


def make_driver(
    policy_cls: type[Policy], after_step: AfterStep, *, depth: int = 1
) -> SchedulerDriver:
    """Return a driver of a scheduler with three batch slots and enough blocks and tokens."""
    limits = SchedulerLimits(
        max_num_seqs=NUM_BATCH_SLOTS, max_num_batched_tokens=64, max_model_len=32
    )
    kv_cache = make_kv_cache(num_blocks=129, block_size=4)
    program = Program(seed=0, limits=limits, kv_cache=kv_cache, depth=depth)
    return SchedulerDriver(Scheduler, program, policy=policy_cls, after_step=after_step)


def add(driver: SchedulerDriver, number: int) -> None:
    """Add the request with this index to the scheduler."""
    driver.add(
        EngineCoreRequest(
            request_id=f"r{number}",
            prompt_token_ids=array("i", [number % 31, 1, 2, 3, 4]),
            sampling_params=SamplingParams(max_tokens=6),
            max_tokens=6,
            priority=PRIORITIES[number % len(PRIORITIES)],
        )
    )


def check_room_for_all(driver: SchedulerDriver, accounts: PolicyAccounts) -> None:
    """With enough batch slots, check that all requests run and none is preempted."""
    for number in range(NUM_BATCH_SLOTS):
        add(driver, number)
    plan = driver.schedule()
    expect(
        len(plan.rows) == NUM_BATCH_SLOTS,
        f"{len(plan.rows)} of {NUM_BATCH_SLOTS} requests run, although there are enough batch "
        "slots",
    )
    driver.settle()
    driver.drain()
    if not accounts.plans:
        expect(
            accounts.num_evicted == 0,
            "a request was preempted, although there were enough batch slots",
        )


def check_few_batch_slots(
    driver: SchedulerDriver, accounts: PolicyAccounts, policy: Policy
) -> None:
    """With too few batch slots, check that requests are preempted only if `preempts` is True.

    A policy that overrides `plan` may evict any request, but all requests must finish.
    """
    for number in range(len(PRIORITIES)):
        add(driver, number)
        driver.schedule()
        expect(
            len(accounts.admitted) <= NUM_BATCH_SLOTS,
            f"{len(accounts.admitted)} requests run, but max_num_seqs is {NUM_BATCH_SLOTS}",
        )
        if policy.preempts and policy.static_rank and not accounts.plans:
            _check_best_run(accounts)
        driver.settle()
    driver.drain()
    if not policy.preempts and not accounts.plans:
        expect(
            accounts.num_evicted == 0,
            "a request was preempted, but the policy declares preempts = False",
        )
    stats = driver.last_stats
    expect(
        stats is None or stats.num_preemptions == accounts.num_evicted,
        f"on_evict was called {accounts.num_evicted} times, but the statistics have "
        f"num_preemptions={stats and stats.num_preemptions}",
    )


def check_newcomer(driver: SchedulerDriver, accounts: PolicyAccounts, policy: Policy) -> None:
    """Check that a new request preempts at most one request, even while steps are in flight."""
    for number in range(NUM_BATCH_SLOTS):
        add(driver, number)
    driver.schedule()
    driver.schedule()
    driver.settle()
    add(driver, PRIORITIES.index(min(PRIORITIES)))
    driver.schedule()
    driver.settle()
    driver.drain()
    maximum = int(policy.preempts)
    expect(
        accounts.num_evicted <= maximum or not policy.static_rank,
        f"{accounts.num_evicted} requests were preempted for one new request; expected at most "
        f"{maximum}",
    )


def _check_best_run(accounts: PolicyAccounts) -> None:
    running = [accounts.alive[name] for name in accounts.admitted]
    for waiting in accounts.waiting:
        worse = [item.request.request_id for item in running if waiting.rank < item.rank]
        expect(
            not worse,
            f"{waiting.request.request_id} with rank {waiting.rank} waits while {worse} with worse "
            "ranks run, although the policy declares preempts = True",
        )
