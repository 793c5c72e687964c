"""Random sequences of arrivals, aborts and steps on a small cache, with integrity checks."""

import random

import pytest

from dovetail.interfaces import Policy


class Longest(Policy):
    """A policy with dynamic ranks and preemption."""

    static_rank = False
    preempts = True

    def rank(self, request, view):
        return -request.num_output_tokens, request.sequence

    def victim(self, running, view):
        return min(running, key=lambda item: (item.num_output_tokens, -item.sequence))


class Priority(Policy):
    preempts = True

    def rank(self, request, view):
        return request.priority, request.sequence

    def victim(self, running, view):
        return max(running, key=lambda item: (item.priority, item.sequence))


def program(driver, rng, depth):
    """Run a random sequence of calls. Return the plans, and the prompt of each request by name."""
    prompts, aborted, plans = {}, set(), []
    for step in range(60):
        while len(prompts) < 30 and rng.random() < 0.4:
            name = f"r{len(prompts)}"
            shared = rng.randrange(3)
            length = rng.randrange(1, 20)
            prompts[name] = [shared] * rng.randrange(9) + [rng.randrange(9) for _ in range(length)]
            driver.add(
                name,
                prompts[name],
                max_tokens=rng.randrange(1, 9),
                priority=rng.randrange(4),
                cache_salt=rng.choice(["", "x"]),
                stop=[100] if step % 2 else [],
            )
        plans.append(driver.plan())
        if prompts and rng.random() < 0.15:
            aborted.update(driver.scheduler.abort_requests([rng.choice(sorted(prompts))]))
            driver.scheduler.check_integrity()
        if len(driver.out) >= depth:
            driver.settle()
    driver.run(depth=depth)
    return plans, prompts, aborted


@pytest.mark.costly
@pytest.mark.parametrize("policy", [None, Priority, Longest])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_its_tokens_once_in_random_scheduler_calls(
    drive, alone, policy, depth, seed
):
    rng = random.Random(seed)
    limits = {
        "num_blocks": rng.choice([9, 14, 40]),
        "max_num_seqs": rng.choice([1, 3, 8]),
        "max_num_batched_tokens": rng.choice([8, 32]),
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice([0, 5]),
    }
    driver = drive(policy=policy, **limits)
    _, prompts, aborted = program(driver, rng, depth)
    assert driver.reasons.keys() == prompts.keys() - aborted
    for name, prompt in prompts.items():
        tokens = driver.tokens[name]
        assert tokens == alone(prompt, len(tokens))
    assert driver.scheduler.view.num_free_blocks == limits["num_blocks"]
    assert driver.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_scheduler_calls_always_give_the_same_plans(drive, seed):
    def plans():
        return program(drive(num_blocks=12), random.Random(seed), depth=2)[0]

    assert plans() == plans()


@pytest.mark.parametrize("seed", range(3))
def test_prompts_computed_in_one_step_give_the_same_tokens_at_every_depth(drive, seed):
    def tokens(depth):
        limits = {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}
        driver = drive(num_blocks=14, max_model_len=56, **limits)
        rng = random.Random(seed)
        for index in range(10):
            driver.add(f"r{index}", rng.randrange(1, 20), max_tokens=rng.randrange(1, 12))
        driver.run(depth=depth)
        return driver.tokens

    assert tokens(1) == tokens(2) == tokens(3) == tokens(4)
