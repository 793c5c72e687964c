"""A scheduler makes the same plans with and without its fast paths for decode steps."""

import random

import pytest

from dovetail.interfaces import Policy
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.policy import AgingPolicy, FakePolicy
from dovetail_devkit.scheduler.program import random_program
from dovetail_devkit.suites.scheduler import check_program


class OneByOne(Scheduler):
    """A scheduler that never uses the decode batch."""

    def __init__(self, context):
        super().__init__(context)
        self._mechanism.in_decode_batch = False


class Priority(Policy):
    preempts = True

    def rank(self, request, view):
        return request.priority, request.sequence

    def victim(self, running, view):
        return max(running, key=lambda item: (item.priority, item.sequence))


class Oldest(Policy):
    """A policy that preempts the oldest request, so that grants of a step are rolled back."""

    def victim(self, running, view):
        return running[0]


def by_plan(policy):
    """Return the policy with a `plan` method that yields the default plan."""

    class ByPlan(policy):
        def plan(self, view):
            yield from super().plan(view)

    return ByPlan


POLICIES = [Policy, Priority, Oldest, FakePolicy, AgingPolicy]


def program(driver, rng, depth):
    """Run requests with long outputs. Return all plans and outputs."""
    seen, names = [], []
    for step in range(90):
        if len(names) < 24 and rng.random() < 0.35:
            names.append(f"r{step:02}")
            driver.add(
                names[-1],
                [rng.randrange(3)] * rng.randrange(1, 9) + [rng.randrange(9)] * rng.randrange(20),
                max_tokens=rng.choice([1, 2, 3, 40]),
                priority=rng.randrange(4),
                stop=rng.choice([(), rng.sample(range(100, 150), 3), range(148, 190)]),
            )
        driver.plan()
        seen.append(repr(driver.out[-1]))
        if names and rng.random() < 0.1:
            seen.append(repr(driver.scheduler.abort_requests([rng.choice(names)])))
            driver.scheduler.check_integrity()
        if len(driver.out) == depth:
            outputs = driver.settle()
            seen.append((outputs.request_ids, outputs.token_ids, outputs.finished))
    driver.run(depth=depth)
    return seen, driver.tokens, driver.stats.num_preemptions


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_decode_batches_and_single_decodes_give_the_same_plans(drive, policy, depth):
    preemptions = 0
    for seed in range(6):
        rng = random.Random(seed)
        limits = {
            "num_blocks": rng.choice([16, 22, 60]),
            "max_num_seqs": rng.choice([3, 12]),
            "max_num_batched_tokens": rng.choice([6, 16, 64]),
            "long_prefill_token_threshold": rng.choice([0, 5]),
            "max_model_len": 60,
        }
        ways = []
        for cls in (Scheduler, OneByOne):
            driver = drive(cls=cls, policy=policy, **limits)
            ways.append(program(driver, random.Random(seed), depth))
        assert ways[0] == ways[1]
        preemptions += ways[0][2]
    assert preemptions > 0


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_inlined_default_plan_and_single_actions_give_the_same_plans(policy):
    for seed in range(10):
        ways = [
            check_program(cls, random_program(seed), policy=each)
            for cls, each in (
                (Scheduler, policy),
                (Scheduler, by_plan(policy)),
                (OneByOne, policy),
            )
        ]
        assert ways[0] == ways[1] == ways[2]


def test_decoding_requests_are_in_the_decode_batch(drive):
    """If the decode batch were empty, the tests of equal plans would not test it."""
    driver = drive()
    for name in "abc":
        driver.add(name, 6, max_tokens=20)
    for _ in range(5):
        driver.step()
    decode_batch = driver.scheduler._state.decode_batch
    assert [item.request_id for item in decode_batch] == [
        "a",
        "b",
        "c",
    ] and not decode_batch.outside
    driver = drive(cls=OneByOne)
    driver.add("a", 6, max_tokens=20)
    for _ in range(5):
        driver.step()
    assert not len(driver.scheduler._state.decode_batch)


def test_a_request_with_many_stop_tokens_is_not_in_the_decode_batch(drive):
    """Each change of the decode batch merges the stop tokens of all members, which takes time."""
    driver = drive()
    driver.add("a", 6, max_tokens=9)
    driver.add("many", 6, max_tokens=9, stop=range(1000, 60_000))
    driver.add("b", 6, max_tokens=9)
    for _ in range(3):
        driver.step()
    decode_batch = driver.scheduler._state.decode_batch
    assert [item.request_id for item in decode_batch] == ["a", "b"]
    assert driver.step().keys() == {"a", "b", "many"}
    driver.run()
    assert set(driver.reasons.values()) == {"length"}
