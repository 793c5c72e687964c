import random
from array import array

import pytest

from bigram_dovetail import RoundRobinScheduler
from dovetail.clock import ManualClock
from dovetail.errors import ConfigError, RequestError
from dovetail.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    NoCacheSpec,
    SchedulerContext,
    SchedulerLimits,
)
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams

NOTHING_KEPT = KVCacheConfig(
    num_blocks=8, groups=(KVCacheGroup(layer_names=(), spec=NoCacheSpec(block_size=16)),)
)


def scheduler(kv_cache=NOTHING_KEPT, **limits):
    defaults = {"max_num_seqs": 2, "max_num_batched_tokens": 4, "max_model_len": 32}
    created = SchedulerLimits(**{**defaults, **limits})
    return RoundRobinScheduler(
        SchedulerContext(limits=created, kv_cache=kv_cache, clock=ManualClock())
    )


def requested(name, num_tokens=3, max_tokens=4, stop=(), **params):
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(stop_token_ids=list(stop), **params),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop),
    )


def answer(plan, token=1):
    num_tokens = sum(plan.samples)
    return ModelRunnerOutput(
        step_id=plan.step_id,
        num_sampled=plan.samples,
        token_ids=array("i", [token] * num_tokens),
    )


def run_dry(scheduler, depth=1, on_step=lambda plan: None):
    """Run all requests with up to `depth` plans in flight. Return (tokens, finished) by id."""
    tokens, finished, out = {}, {}, []
    while alive(scheduler):
        while len(out) < depth:
            out.append(scheduler.schedule())
            on_step(out[-1])
        arguments = scheduler.update_from_output(out[0], answer(out.pop(0)))
        for name, num_tokens in zip(arguments.request_ids, arguments.num_new_tokens, strict=True):
            tokens[name] = tokens.get(name, 0) + num_tokens
        for end in arguments.finished:
            assert end.request_id not in finished
            finished[end.request_id] = end
    return tokens, finished


def alive(scheduler):
    depth = scheduler.depth()
    return depth.num_waiting + depth.num_running


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_gets_all_its_tokens(depth):
    subject = scheduler()
    for i in range(5):
        subject.add_request(requested(f"r{i}", num_tokens=1 + 3 * i, max_tokens=1 + i))
    tokens, finished = run_dry(subject, depth)
    assert tokens == {f"r{i}": 1 + i for i in range(5)}
    assert {end.reason for end in finished.values()} == {FinishReason.LENGTH}
    assert len(finished) == 5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_runs_in_chunks_between_other_requests(depth):
    subject = scheduler()
    subject.add_request(requested("long", num_tokens=10))
    subject.add_request(requested("short", num_tokens=2))
    runs = []

    def note(plan):
        runs.extend(zip(plan.rows, plan.num_tokens, plan.samples, strict=True))

    run_dry(subject, depth, note)
    assert [n for row, n, samples in runs if row == 0][:3] == [4, 4, 2]
    assert [samples for row, n, samples in runs if row == 0][:4] == [0, 0, 1, 1]
    assert [row for row, *_ in runs[:6]] == [0, 1, 0, 1, 0, 1]


def test_a_stop_token_ends_a_request_but_not_before_min_tokens():
    subject = scheduler()
    subject.add_request(requested("a", stop=[1]))
    subject.add_request(requested("b", stop=[1], min_tokens=3))
    tokens, finished = run_dry(subject)
    assert tokens == {"a": 1, "b": 3}
    assert finished["a"].reason == FinishReason.STOP
    assert finished["a"].stop_reason == 1


def test_an_abort_during_a_step_drops_the_result_and_frees_the_batch_slot():
    subject = scheduler(max_num_seqs=1)
    subject.add_request(requested("a"))
    subject.add_request(requested("b"))
    plan = subject.schedule()
    assert subject.abort_requests(["a", "nobody", "a"]) == ["a"]
    blocked = subject.schedule()
    assert blocked.empty
    assert list(blocked.leaves) == [0]
    assert not subject.update_from_output(plan, answer(plan)).request_ids
    (join,) = subject.schedule().joins
    assert (join.request_id, join.row, join.generation) == ("b", 0, 2)


def test_requests_that_can_never_run_are_rejected():
    subject = scheduler(max_model_len=8, enable_chunked_prefill=False)
    subject.add_request(requested("a"))
    for request in (
        requested("a"),
        requested("b", num_tokens=8),
        requested("c", 5),
        requested("d", 0),
    ):
        with pytest.raises(RequestError):
            subject.add_request(request)


def test_a_model_with_a_cache_is_rejected():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
    kept = KVCacheConfig(num_blocks=8, groups=(KVCacheGroup(layer_names=("a",), spec=spec),))
    with pytest.raises(ConfigError, match="scheduler_cls"):
        scheduler(kept)


@pytest.mark.parametrize("seed", range(20))
def test_random_scheduler_calls_follow_the_contract(seed):
    rng = random.Random(seed)
    subject = scheduler(max_num_seqs=rng.choice([1, 3]), max_num_batched_tokens=rng.choice([1, 5]))
    out, expected, arguments = [], {}, {}
    for turn in range(300):
        if turn < 200 and rng.random() < 0.2:
            name = f"r{turn}"
            expected[name] = rng.randint(1, 6)
            subject.add_request(requested(name, rng.randint(1, 12), expected[name]))
        if expected and rng.random() < 0.05:
            for name in subject.abort_requests([rng.choice(list(expected))]):
                del expected[name]
                arguments.pop(name, None)
        if len(out) < 2 and rng.random() < 0.6:
            out.append(subject.schedule())
        elif out:
            take(subject, out.pop(0), arguments)
    while alive(subject):
        plan = subject.schedule()
        out.append(plan)
        take(subject, out.pop(0), arguments)
    assert arguments == expected


def take(subject, plan, arguments):
    output = subject.update_from_output(plan, answer(plan))
    for name, num_tokens in zip(output.request_ids, output.num_new_tokens, strict=True):
        arguments[name] = arguments.get(name, 0) + num_tokens
