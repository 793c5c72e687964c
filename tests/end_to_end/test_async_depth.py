"""Planning one step ahead changes the timing of steps, but no token."""

from __future__ import annotations

import random

import pytest

from dovetail import LLM, SamplingParams
from end_to_end.checkpoints import letters

NUM_REQUESTS = 20


def mixed(seed, tokenizer):
    """Return prompts, some with a shared prefix, and sampling parameters of every kind."""
    rng = random.Random(seed)
    shared = [rng.randrange(4, 300) for _ in range(24)]
    readable = letters(tokenizer)
    prompts, params = [], []
    for number in range(NUM_REQUESTS):
        own = [rng.randrange(4, 300) for _ in range(rng.randrange(1, 30))]
        prompts.append(shared[: rng.choice([0, 0, 13, 24])] + own)
        changes = {
            0: {"temperature": 0},
            1: {"seed": number},
            2: {"temperature": 0, "stop_token_ids": rng.sample(range(4, 320), 60)},
            3: {"seed": number, "allowed_token_ids": readable, "stop": ["a", "e "]},
            4: {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
            5: {"seed": number, "n": 2, "min_tokens": 4, "frequency_penalty": 0.5},
            6: {"temperature": 0, "prompt_logprobs": 1},
        }[number % 7]
        changes = {"seed": number, "ignore_eos": True, "temperature": 1.0} | changes
        params.append(SamplingParams(max_tokens=rng.randrange(1, 24), **changes))
    return prompts, params


def result_of(output):
    return [
        (part.token_ids, part.text, part.finish_reason, part.stop_reason) for part in output.outputs
    ]


def answers(model_dir, options, prompts, params, **changes):
    with LLM(model_dir, **(options | changes)) as llm:
        outputs = llm.generate(prompts, params)
        again = llm.generate(prompts, params)  # now with a warm prefix cache
        stats = llm.llm_engine.last_stats
        assert llm.reset_prefix_cache(), "blocks are left in use"
    assert [result_of(out) for out in outputs] == [result_of(out) for out in again]
    for out in outputs:
        read = [next(iter(here)) for here in (out.prompt_logprobs or ())[1:]]
        assert read in ([], out.prompt_token_ids[1:])
    return [result_of(out) for out in outputs], stats


SMALL = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 24, "max_num_seqs": 6}
CASES = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 9},
    "tiny cache": SMALL,
    "tiny cache, chunks": SMALL | {"max_num_batched_tokens": 8},
    "tiny cache, no prefix caching": SMALL | {"enable_prefix_caching": False},
    "one batch slot": {"max_num_seqs": 1},
    "no chunked prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "priority": SMALL | {"scheduler_cls": "priority"},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_planning_one_step_ahead_changes_no_token(model_dir, llm, options, changes):
    prompts, params = mixed(7, llm.get_tokenizer())
    behind, stats = answers(model_dir, options, prompts, params, **changes)
    depths = (2, 3, 4) if changes in ({}, SMALL) else (2,)
    for depth in depths:
        ahead, _ = answers(model_dir, options, prompts, params, pipeline_depth=depth, **changes)
        assert ahead == behind, f"different tokens with {depth} steps in flight"
    assert behind == reference(llm, prompts, params)
    if changes.get("kv_cache_memory_bytes", 1) is None:
        assert stats.num_preemptions > 0


def reference(llm, prompts, params):
    """Return the result of each request when it runs alone in an engine with a large cache."""
    collected = []
    for prompt, request_params in zip(prompts, params, strict=True):
        llm.reset_prefix_cache()
        collected.append(result_of(llm.generate([prompt], request_params)[0]))
    return collected
