"""More random programs than in the suite: hypothesis searches for failing scheduler limits."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.interfaces import SchedulerLimits
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.policy import FakePolicy
from dovetail_devkit.scheduler.program import Program, make_kv_cache, random_program
from dovetail_devkit.suites.scheduler import check_program
from dovetail_sched_priority import PriorityPolicy

POLICIES = [None, PriorityPolicy, FakePolicy]
NUM_SOAKED = 2000
PREEMPTED_FOR_NOTHING = (560025734, 3927509902, 687486590)
"""Programs in which a step preempted a request and then ran no other request."""


def check_more(scheduler):
    scheduler.check_integrity()


@st.composite
def programs(rng):
    seqs = rng(st.integers(1, 6))
    length = rng(st.integers(3, 30))
    block_size = rng(st.integers(1, 5))
    chunked = rng(st.booleans())
    minimum = -(-length // block_size)
    return Program(
        seed=rng(st.integers(0, 2**32)),
        limits=SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=rng(st.integers(seqs, seqs + 20)),
            max_model_len=length,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng(st.integers(0, 4)) if chunked else 0,
            enable_prefix_caching=rng(st.booleans()),
        ),
        kv_cache=make_kv_cache(
            num_blocks=1 + minimum + rng(st.integers(0, 2 * minimum)), block_size=block_size
        ),
        depth=rng(st.integers(1, 2)),
        num_turns=rng(st.integers(1, 40)),
    )


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(program=programs())
def test_the_scheduler_follows_the_contract_in_generated_calls(policy, program):
    check_program(Scheduler, program, policy=policy, after_step=check_more)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", PREEMPTED_FOR_NOTHING)
def test_a_step_can_use_the_blocks_of_the_request_that_it_preempts(policy, seed):
    check_program(Scheduler, random_program(seed), policy=policy, after_step=check_more)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
def test_the_scheduler_follows_the_contract_in_many_generated_calls(policy):
    for seed in random.Random(1).sample(range(100, 2**32), NUM_SOAKED):
        check_program(Scheduler, random_program(seed), policy=policy, after_step=check_more)
