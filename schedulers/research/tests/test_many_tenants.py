"""Clients choose the names of tenants: memory and time of a policy must not depend on them."""

import time
from types import SimpleNamespace

import pytest

from dovetail.interfaces.policy import Grant
from dovetail_sched_research.dlpm import DLPMPolicy
from dovetail_sched_research.predictors import make_predictor
from dovetail_sched_research.tenants import MAX_IDLE_TENANTS
from dovetail_sched_research.vtc import VTCPolicy


def request(number, tenant, *, prompt=10):
    return SimpleNamespace(
        request_id=str(number),
        sequence=number,
        tenant=tenant,
        num_prompt_tokens=prompt,
        num_preemptions=0,
    )


class View(SimpleNamespace):
    """A view of a scheduler with one waiting request."""

    def __init__(self, *waiting):
        super().__init__(waiting=waiting, running=(), seats_left=1)


def serve(policy, item, num_tokens):
    """Let the policy admit a request that is computed at once."""
    view = View(item)
    policy.on_arrival(item, view)
    plan = policy.plan(view)
    next(plan)
    plan.send(Grant(num_tokens=1))
    with pytest.raises(StopIteration):
        plan.send(Grant(num_tokens=item.num_prompt_tokens))
    policy.on_output(item, num_tokens, view)
    policy.on_finish(item, view)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("policy", "numbers"), [(VTCPolicy(), "_counters"), (DLPMPolicy(), "_credits")]
)
def test_the_memory_for_tenants_is_limited_and_a_tenant_with_much_service_is_remembered(
    policy, numbers
):
    waits = request(0, "waits")
    policy.on_arrival(waits, View(waits))
    serve(policy, request(1, "greedy"), 10**9)
    expected = getattr(policy, numbers)["greedy"]
    for number in range(2, 3 * MAX_IDLE_TENANTS):
        serve(policy, request(number, f"tenant {number}"), 1)
        assert len(getattr(policy, numbers)) <= MAX_IDLE_TENANTS + 5
    assert getattr(policy, numbers)["greedy"] == expected


def test_a_long_prompt_needs_one_refill_of_a_small_quantum():
    policy, begin = DLPMPolicy({"quantum": 1}), time.process_time()
    for number in range(2):
        serve(policy, request(number, "a", prompt=10**9), 1)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("predictor", ["bucketed:1.0000000000000003", "noisy:1e300"])
def test_a_predictor_with_an_extreme_number_returns_a_length_in_limited_time(predictor):
    predict, begin = make_predictor(predictor), time.process_time()
    for number in range(20):
        item = request(number, "a")
        item.max_total_tokens, item.sampling_params = 10**6, SimpleNamespace(extra_args={})
        assert 1 <= predict(item) < float("inf")
    assert time.process_time() - begin < 1
