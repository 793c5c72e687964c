"""Two engines in one process with different models and attention backends, stepped alternately."""

from __future__ import annotations

import random

import pytest

from dovetail import SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.llm_engine import LLMEngine
from dovetail_devkit.fakes.attention import FakeAttentionBackend


def requests(seed):
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(4, 300) for _ in range(rng.randrange(1, 40))],
            SamplingParams(max_tokens=rng.randrange(3, 15), temperature=0.7, seed=seed + n),
        )
        for n in range(8)
    ]


def start(model, backend, options, **changes):
    args = EngineArgs(model=model, attention_backend=backend, **(options | changes))
    return LLMEngine.from_engine_args(args)


def run(engines_and_requests):
    """Add requests and step the engines alternately. Return each engine's tokens by request."""
    results = [{} for _ in engines_and_requests]
    for (engine, requests_of_engine), _ in zip(engines_and_requests, results, strict=True):
        for number, (prompt, params) in enumerate(requests_of_engine):
            engine.add_request(str(number), prompt, params)
    while any(engine.has_unfinished_requests() for engine, _ in engines_and_requests):
        for (engine, _), response in zip(engines_and_requests, results, strict=True):
            done = [out for out in engine.step() if out.finished]
            response |= {out.request_id: out.outputs[0].token_ids for out in done}
    return results


@pytest.mark.parametrize("ahead", [False, True], ids=["depth1", "depth2"])
def test_two_engines_together_give_the_same_tokens_as_each_engine_alone(
    model_dir, qwen_dir, options, ahead
):
    plans = [
        (model_dir, "torch", {"max_num_batched_tokens": 24}, requests(1)),
        (qwen_dir, FakeAttentionBackend, {"block_size": 8}, requests(2)),
        (model_dir, FakeAttentionBackend, {"seed": 9}, requests(3)),
    ]
    alone = []
    for model, backend, changes, requests_of_engine in plans:
        engine = start(model, backend, options, **changes)
        alone += run([(engine, requests_of_engine)])
        engine.shutdown()
    together = [
        (start(model, backend, options, async_scheduling=ahead, **changes), requests_of_engine)
        for model, backend, changes, requests_of_engine in plans
    ]
    assert run(together) == alone
    assert alone[0] != alone[2]
    workers = [engine.client.core.executor._worker for engine, _ in together]
    assert [worker._backend.name for worker in workers] == ["torch", "fake", "fake"]
    for engine, _ in together:
        engine.shutdown()


def test_shutdown_of_one_engine_does_not_affect_the_other(model_dir, qwen_dir, options):
    first, second = start(model_dir, "torch", options), start(qwen_dir, "torch", options)
    expected = run([(second, requests(4))])
    second.reset_prefix_cache()
    for number, (prompt, params) in enumerate(requests(4)):
        second.add_request(str(number), prompt, params)
    second.step()
    first.shutdown()
    response = {}
    while second.has_unfinished_requests():
        done = [out for out in second.step() if out.finished]
        response |= {out.request_id: out.outputs[0].token_ids for out in done}
    assert [response] == expected
    second.shutdown()
