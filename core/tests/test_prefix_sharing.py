"""Common blocks of prompts are computed once, even if the prompts arrive together."""

import random

import pytest

from dovetail import LLM
from dovetail.clock import ManualClock
from dovetail.engine.core import EngineCore
from dovetail.interfaces import Policy, SchedulerContext, SchedulerLimits
from dovetail.interfaces.policy import Evict, Hold
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit import FAKES
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.executor.null_executor import NullExecutor
from dovetail_devkit.scheduler.random_programs import make_kv_cache
from dovetail_devkit.suites.scheduler import make_request

LENGTH = 2001
SHARED = [7 + index % 5000 for index in range(LENGTH)]
BIG = {"num_blocks": 2000, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 16}


def run_and_count(driver, *, depth=1):
    """Run all requests. Return the number of computed tokens, in total and by request."""
    counts = {}
    for _ in range(3000):
        left = driver.scheduler.depth()
        if left.num_running or left.num_waiting:
            for name, (_start, count) in driver.plan().items():
                counts[name] = counts.get(name, 0) + count
        elif not driver.out:
            return counts
        if len(driver.out) >= depth or not left.num_active:
            driver.settle()
    raise AssertionError("not done")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("budget", "threshold"), [(32768, 0), (512, 0), (1000, 0), (4096, 100), (4096, 96)]
)
def test_equal_prompts_are_computed_once(drive, alone, budget, threshold, depth):
    limits = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}
    driver = drive(**BIG, **limits)
    for name in "abcdefgh":
        driver.add(name, SHARED, max_tokens=1)
    counts = run_and_count(driver, depth=depth)
    assert counts == {"a": LENGTH} | dict.fromkeys("bcdefgh", 1)
    assert [driver.tokens[name] for name in "abcdefgh"] == [alone(SHARED, 1)] * 8
    assert driver.cached == {"a": 0} | dict.fromkeys("bcdefgh", LENGTH - 1)


def test_an_unrelated_prompt_is_admitted_before_requests_that_wait_for_a_prefix(drive):
    driver = drive(**BIG, max_num_batched_tokens=4096, long_prefill_token_threshold=100)
    for name in "abc":
        driver.add(name, SHARED)
    driver.add("other", 50)
    assert driver.step() == {"a": (0, 100), "other": (0, 50)}
    assert driver.step() == {"other": (50, 1), "a": (100, 100)}
    assert driver.waiting() == ["b", "c"]


def test_each_branch_of_a_prompt_tree_is_computed_once(drive, alone):
    driver = drive(**BIG, max_num_batched_tokens=4096)
    stem, left, right = SHARED[:160], [1] * 80, [2] * 80
    prompts = {
        "a": [*stem, *left, 11],
        "b": [*stem, *right, 12],
        "c": [*stem, *right, 13, 14],
        "d": [*stem, *left, 15],
        "e": stem[:100],
    }
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=1)
    assert run_and_count(driver) == {"a": 241, "b": 81, "c": 2, "d": 1, "e": 4}
    for name, prompt in prompts.items():
        assert driver.tokens[name] == alone(prompt, 1)


@pytest.mark.parametrize("how", ["abort", "hold", "evict"])
def test_a_request_that_waits_for_a_prefix_continues_when_the_request_that_computes_it_stops(
    drive, alone, how
):
    class Stops(Policy):
        stops = False

        def plan(self, view):
            for request in view.running if Stops.stops else ():
                if request.request_id == "a":
                    yield (Hold if how == "hold" else Evict)(request)
            yield from super().plan(view)

    driver = drive(
        **BIG, policy=Stops, max_num_batched_tokens=4096, long_prefill_token_threshold=160
    )
    for name in "ab":
        driver.add(name, SHARED, max_tokens=1)
    assert driver.step() == {"a": (0, 160)}
    if how == "abort":
        driver.scheduler.abort_requests(["a"])
    Stops.stops = how != "abort"
    assert driver.step() == {"b": (160, 160)}
    Stops.stops = False
    driver.run()
    assert driver.tokens["b"] == alone(SHARED, 1)


def test_no_request_waits_for_a_prefix_across_salts_or_with_prompt_logprobs(drive):
    driver = drive(**BIG, max_num_batched_tokens=16384)
    driver.add("a", SHARED)
    driver.add("salted", SHARED, cache_salt="mine")
    driver.add("whole", SHARED, params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert driver.step() == dict.fromkeys(["a", "salted", "whole"], (0, LENGTH))
    driver = drive(**BIG, max_num_batched_tokens=16384, enable_prefix_caching=False)
    for name in "ab":
        driver.add(name, SHARED)
    assert driver.step() == dict.fromkeys("ab", (0, LENGTH))


def test_a_longer_prompt_uses_the_last_full_block_of_a_shorter_prompt(drive):
    driver = drive(**BIG, max_num_batched_tokens=16384)
    driver.add("a", SHARED[:32], max_tokens=1)
    driver.add("b", SHARED[:33], max_tokens=1)
    driver.add("c", SHARED[:32], max_tokens=1)
    assert run_and_count(driver) == {"a": 32, "b": 1, "c": 16}


def test_if_a_step_reaches_its_limit_of_prefix_hits_later_steps_admit_the_other_requests(
    drive, monkeypatch
):
    monkeypatch.setattr("dovetail.scheduling.prefix_sharing.MAX_BLOCKS_FOUND", 200)
    driver = drive(**BIG, max_num_batched_tokens=4096)
    driver.add("first", SHARED, max_tokens=1)
    driver.run()
    for name in "abcdef":
        driver.add(name, SHARED, max_tokens=1)
    assert [list(driver.step()) for _ in range(3)] == [["a", "b"], ["c", "d"], ["e", "f"]]


@pytest.mark.parametrize("preempts", [False, True])
def test_a_long_prompt_is_hashed_in_slices_and_does_not_delay_other_requests(
    drive, alone, monkeypatch, preempts
):
    class PreemptingPolicy(Policy):
        pass

    PreemptingPolicy.preempts = preempts
    for name, maximum in (("MAX_BLOCKS_HASHED", 50), ("MIN_BLOCKS_HASHED", 5)):
        monkeypatch.setattr(f"dovetail.scheduling.prefix_sharing.{name}", maximum)
    driver = drive(**BIG, policy=PreemptingPolicy, max_num_batched_tokens=4096)
    driver.add("long", SHARED, max_tokens=1)
    other = driver.add("other", 33, max_tokens=2)
    assert [list(driver.step()) for _ in range(3)] == [["other"], ["other"], ["long"]]
    driver.run()
    assert driver.tokens["long"] == alone(SHARED, 1)
    assert driver.tokens["other"] == alone(other, 2)


def test_a_step_hashes_and_skips_a_bounded_number_of_blocks(drive, alone, monkeypatch):
    limits = {"MAX_BLOCKS_HASHED": 40, "MIN_BLOCKS_HASHED": 4, "MAX_SKIPPED": 9}
    for name, maximum in limits.items():
        monkeypatch.setattr(f"dovetail.scheduling.prefix_sharing.{name}", maximum)
    driver = drive(num_blocks=500, max_num_batched_tokens=64, max_num_seqs=4)
    prompts = {f"r{number}": [number, *range(200)] for number in range(30)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=1)
    requests = driver.scheduler._state.requests
    num_hashed, num_steps = 0, 0
    while requests:
        driver.step()
        num_steps += 1
        known = sum(len(item.block_hashes) for item in [*requests.values()])
        # A step also hashes up to 16 blocks that it computes.
        assert known - num_hashed <= 2 * 40 + 4 + 16
        num_hashed = known
        passed = len(driver.scheduler._host.waiting._late)
        assert passed <= 9
    assert num_steps <= 30 * 4 + 40
    assert driver.tokens == {name: alone(prompt, 1) for name, prompt in prompts.items()}


class AsksOfAll(Policy):
    """A policy that, like `dlpm`, queries the number of cached tokens of every request."""

    static_rank = False

    def __init__(self):
        self.num_cached = {}

    def rank(self, request, view):
        self.num_cached[request.request_id] = view.num_cached_tokens(request)
        return request.sequence


def test_policies_that_query_cached_tokens_do_not_hash_every_prompt(drive, monkeypatch):
    monkeypatch.setattr("dovetail.scheduling.scheduler_state.MAX_BLOCKS_HASHED", 500)
    driver = drive(
        policy=AsksOfAll,
        **(BIG | {"block_size": 4, "max_num_seqs": 1}),
        max_num_batched_tokens=128,
        long_prefill_token_threshold=64,
    )
    driver.add("first", SHARED[:800], max_tokens=1)
    driver.run()
    for number in range(20):
        driver.add(f"r{number}", [number, *SHARED[1:1000]])
    driver.add("like", SHARED[:1000])
    driver.add("copy", SHARED[:1000])
    driver.step()
    requests = driver.scheduler._state.requests.values()
    assert sum(len(request.block_hashes) for request in requests) < 20 * 64
    for _ in range(4):
        driver.step()
    notified = driver.scheduler.policy.num_cached
    assert notified["like"] == notified["copy"] == 800
    assert notified["r3"] == 0


@pytest.mark.parametrize("windows", [(0, 0), (0, 12), (12,)])
def test_equal_prompts_are_computed_once_with_full_attention_and_sliding_windows(windows):
    context = SchedulerContext(
        limits=SchedulerLimits(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=256,
            long_prefill_token_threshold=16,
        ),
        kv_cache=make_kv_cache(num_blocks=400, block_size=4, windows=windows),
        clock=ManualClock(),
    )
    core = EngineCore(NullExecutor(), Scheduler(context), vocab_size=100, max_model_len=256)
    for name in "abcd":
        core.add_request(make_request(name, [index % 90 for index in range(101)], max_tokens=1))
    computed = 0
    while core.has_work():
        computed += core.step().stats.num_scheduled_tokens
        core.scheduler.check_integrity()
    assert computed == 101 + 3


@pytest.mark.parametrize("ahead", [False, True])
def test_copies_of_a_prompt_in_one_generate_call_are_found_in_the_cache(tmp_path, ahead):
    params = SamplingParams(max_tokens=3, seed=1, detokenize=False, ignore_eos=True)
    with LLM(
        write_fake_config(tmp_path),
        platform=FAKES["platform"],
        worker_cls=FAKES["worker"],
        scheduler_cls="dovetail.scheduling:Scheduler",
        skip_tokenizer_init=True,
        async_scheduling=ahead,
        **(SMALL_ENGINE | {"max_num_seqs": 8}),
    ) as llm:
        prompts = [[*range(1, 30)]] * 5 + [[*range(30, 50)]]
        outputs = llm.generate(prompts, params)
        assert [output.num_cached_tokens for output in outputs] == [0, 28, 28, 28, 28, 0]
        assert len({tuple(output.outputs[0].token_ids) for output in outputs[:5]}) == 1
        llm.reset_prefix_cache()
        (alone,) = llm.generate([prompts[0]], params)
        assert alone.outputs[0].token_ids == outputs[3].outputs[0].token_ids


def tree_prompt(rng):
    """Return a path in a small tree of prompts, so that many prompts share a prefix."""
    prompt = []
    for depth in range(rng.randrange(1, 5)):
        prompt += [depth * 10 + rng.randrange(2)] * rng.randrange(1, 4) * 3
    return prompt


def note_blocks(computed, name, prompt, indexes):
    """Record for each shared block the request that computes its last token."""
    for end in indexes:
        if (end + 1) % 4 == 0 and end + 1 < len(prompt):
            computed.setdefault(tuple(prompt[: end + 1]), set()).add(name)


@pytest.mark.parametrize("seed", range(12))
def test_each_shared_block_is_computed_once_in_random_scheduler_calls(drive, alone, seed):
    rng = random.Random(seed)
    ample = seed % 2 == 0
    limits = {
        "num_blocks": 800 if ample else 30,
        "max_num_batched_tokens": rng.choice([7, 16, 64]),
        "long_prefill_token_threshold": rng.choice([0, 5]),
        "max_num_seqs": rng.choice([3, 8]),
    }
    depth = rng.choice([1, 2])
    driver = drive(**limits)
    prompts, computed = {}, {}
    for number in range(120):
        if rng.random() < 0.4 and number < 90:
            name = f"r{number}"
            prompts[name] = tree_prompt(rng)
            driver.add(name, prompts[name], max_tokens=3)
        for name, (start, count) in driver.plan().items():
            note_blocks(computed, name, prompts[name], range(start, start + count))
        if not ample and prompts and rng.random() < 0.1:
            driver.scheduler.abort_requests([rng.choice(list(prompts))])
        if len(driver.out) == depth:
            driver.settle()
    driver.run(depth=depth)
    for name, reason in driver.reasons.items():
        assert reason == "length" and driver.tokens[name] == alone(prompts[name], 3)
    if ample:
        assert set(driver.reasons) == set(prompts)
        assert all(len(names) == 1 for names in computed.values()), "a block was computed twice"
