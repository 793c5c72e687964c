"""Streams through the whole engine with real models, and the example of the documentation page."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random

import pytest

from dovetail import AsyncLLM, EngineArgs, SamplingParams
from dovetail.outputs import RequestOutputKind
from end_to_end.checkpoints import OPTIONS

SEED = 20261121
PAGE = Path(__file__).resolve().parents[2] / "docs" / "async.md"
WORDS = ["The", "quick", "brown", "fox", "jumps", "over", "lazy", "zebras", "judging", "quartz"]


def requests():
    rng = Random(SEED)
    for index in range(24):
        yield (
            " ".join(rng.choices(WORDS, k=rng.randint(1, 12))),
            SamplingParams(
                max_tokens=rng.randint(1, 24),
                temperature=0 if index % 2 else 0.8,
                seed=index,
                n=3 if index % 6 == 0 else 1,
                logprobs=2 if index % 5 == 0 else None,
                stop=["e", " q"] if index % 4 == 0 else None,
                ignore_eos=True,
            ),
        )


async def deltas(llm, prompt, params):
    """Return the joined text, tokens and finish reasons of a request's completions, by index."""
    by_name = {}
    kind = RequestOutputKind.DELTA
    async for output in llm.generate(prompt, params, output_kind=kind):
        for item in output.outputs:
            text, tokens, _ = by_name.get(item.index, ("", [], None))
            ending = item.finish_reason, item.stop_reason
            by_name[item.index] = text + item.text, tokens + item.token_ids, ending
    return by_name


def test_streams_have_the_same_outputs_as_llm_generate(llm, model_dir):
    prompts, params = zip(*requests(), strict=True)
    expected = llm.generate(list(prompts), list(params), use_tqdm=False)

    async def stream_all():
        async with AsyncLLM.from_engine_args(EngineArgs(model=model_dir, **OPTIONS)) as first:
            return await asyncio.gather(*(deltas(first, *request) for request in requests()))

    actual = asyncio.run(stream_all())
    assert actual == [
        {
            done.index: (done.text, done.token_ids, (done.finish_reason, done.stop_reason))
            for done in output.outputs
        }
        for output in expected
    ]
    assert {done.finish_reason for output in expected for done in output.outputs} == {
        "length",
        "stop",
    }


def test_the_example_of_the_asynchronous_api_page_runs(capfd):
    pytest.importorskip("dovetail_demo_model")
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    names = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    args = EngineArgs(model="demo", num_threads=1, use_tqdm_on_load=False)
    results = asyncio.run(names["main"](AsyncLLM.from_engine_args(args)))
    assert results == ["27 + 58 = 85.", "Reversed: window, bank, robot."]
    pieces = {question: "" for question in names["QUESTIONS"]}
    for line in capfd.readouterr().out.splitlines():
        question, _, piece = line.partition(" | ")
        pieces[question] += piece
    assert list(pieces.values()) == results
