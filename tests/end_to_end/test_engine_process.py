"""An engine process gives the same outputs, probabilities and errors as an in-process engine."""

from __future__ import annotations

import random

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import RequestError, WeightError
from end_to_end.checkpoints import make_checkpoint

SEED = 20261121


def requests():
    rng = random.Random(SEED)
    prompts = [[rng.randrange(4, 300) for _ in range(rng.randrange(1, 40))] for _ in range(10)]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(3, 15),
            temperature=number % 2,
            seed=number,
            n=1 + number % 3,
            logprobs=number % 4,
            prompt_logprobs=2 if number % 5 == 0 else None,
        )
        for number in range(9)
    ]
    return ["Tell me a story", *prompts[:8]], params


def answers(model_dir, options, **changes):
    with LLM(model_dir, **(options | changes)) as llm:
        prompts, params = requests()
        outputs = llm.generate(prompts, params)
        stats = llm.llm_engine.last_stats
        with pytest.raises(RequestError) as caught:
            llm.generate([[5], [10**6]], params[0])
        rejection = str(caught.value), caught.value.parameter
        assert llm.llm_engine.collective_rpc("get_model_info")
    plain = [
        (
            out.prompt,
            out.prompt_token_ids,
            out.num_cached_tokens,
            out.prompt_logprobs,
            [
                (output.text, output.token_ids, output.finish_reason, output.logprobs)
                for output in out.outputs
            ],
        )
        for out in outputs
    ]
    return plain, rejection, (stats.num_blocks, stats.prefix_queries, stats.prefix_hits)


@pytest.mark.parametrize("ahead", [False, True], ids=["depth1", "depth2"])
def test_outputs_equal_those_of_an_in_process_engine(model_dir, options, ahead):
    here = answers(model_dir, options, async_scheduling=ahead)
    there = answers(model_dir, options, async_scheduling=ahead, engine_process=True)
    assert there == here


def test_a_failed_start_in_the_engine_process_raises_in_the_parent(tmp_path, options):
    path = make_checkpoint(tmp_path)
    weights = next(path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(WeightError, match=weights.name):
        LLM(path, engine_process=True, **options)
