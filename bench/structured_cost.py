"""Measure the cost of a grammar per step, without other engines.

Method. Two engines of one model, each with a batch of 16 greedy requests. No output completes its
grammar within the measured tokens. In each round the same prompts run without and with the grammar,
in turn; a step's duration is the wall time of a round divided by its number of steps. The results
are medians of the rounds and of their ratios. "without" is an engine with `grammar_backend="none"`,
which shows the cost of the plugin for a batch without constraints. For a single request, the time
to the first token with a cached grammar is compared with that of an unconstrained request.

With `--burst 64`, that many requests of 4 prompt tokens and 4 output tokens arrive together while 4
unconstrained requests generate. Each has a new schema of 20 properties. The burst is then repeated
with the same schemas, which are now compiled. The results are the ratios of the ITL of the 4
requests in the first burst to that in the second. (The additional requests make steps longer in
both.)

    python bench/structured_cost.py [--model smollm2] [--tokenizer DIR] [--requests 16]
        [--rounds 9] [--tokens 96] [--burst 64]

`--model llama-160m` writes the shape of that name (checkpoints.py); it needs `--tokenizer`, a
directory with a tokenizer of at most 32,000 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, make_checkpoint

from dovetail import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 4000}, "minItems": 3}
PROMPT_TOKENS = 64


def params_of(num_tokens: int, *, constrained: bool) -> SamplingParams:
    """Return greedy sampling of exactly `num_tokens` tokens."""
    grammar = StructuredOutputsParams(json=SCHEMA) if constrained else None
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=grammar is None,
        structured_outputs=grammar,
    )


def seconds(llm: LLM, prompts: list[Any], params: SamplingParams) -> float:
    """Return the wall time of one batch."""
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took_s = time.perf_counter() - begin_s
    assert all(len(output.outputs[0].token_ids) == params.max_tokens for output in outputs)
    return took_s


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokenizer")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--burst", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model in SHAPES:
            model = str(make_checkpoint(model, Path(folder)))
        options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 1024}
        if args.tokenizer:
            options["tokenizer"] = args.tokenizer
        with LLM(model, **options) as llm, LLM(model, grammar_backend="none", **options) as without:
            measure(llm, without, args)
            if args.burst:
                measure_burst(llm, args)


def new_schema(number: int) -> dict[str, Any]:
    """Return a schema that no other request has."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "pattern": f"^[a-z]{{2,{number % 40 + 3}}}$"},
        {"type": "integer", "minimum": number},
        {"type": "array", "items": {"type": "string"}, "maxItems": 9},
        {"enum": [f"a{number}", f"b{number}"]},
    ]
    names = [f"field {number} {index}" for index in range(20)]
    properties = {name: kinds[index % len(kinds)] for index, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names}


def intervals_ms(llm: LLM, args: argparse.Namespace, first: int) -> list[float]:
    """Return the times between tokens of 4 unconstrained requests until the others have finished.

    first: number of the first schema.
    """
    engine, watched, others = llm.llm_engine, {f"w{row}" for row in range(4)}, set()
    prompt = [index % 200 + 10 for index in range(PROMPT_TOKENS)]
    for name in watched:
        engine.add_request(name, prompt, params_of(800, constrained=False))
    for _ in range(40):
        engine.step()
    for row in range(args.burst):
        grammar = StructuredOutputsParams(json=new_schema(first + row))
        params = SamplingParams(temperature=0.0, max_tokens=4, structured_outputs=grammar)
        others.add(name := f"o{row}")
        engine.add_request(name, prompt[:4], params)
    collected, last_s = [], dict.fromkeys(watched, time.perf_counter())
    while others:
        for output in engine.step():
            if output.request_id in last_s:
                now_s = time.perf_counter()
                collected.append(1000 * (now_s - last_s[output.request_id]))
                last_s[output.request_id] = now_s
            elif output.finished:
                others.discard(output.request_id)
    engine.abort_request(list(watched))
    while engine.has_unfinished_requests():
        engine.step()
    return collected


def measure_burst(llm: LLM, args: argparse.Namespace) -> None:
    """Run the bursts in turn and print the ratios of medians and 99th percentiles."""
    ratios = []
    for round_number in range(args.rounds):
        first = args.burst * round_number
        rows = [intervals_ms(llm, args, first) for _ in range(2)]
        middles = [statistics.median(row) for row in rows]
        tails = [sorted(row)[int(0.99 * (len(row) - 1))] for row in rows]
        ratios.append((middles[0] / middles[1], tails[0] / tails[1]))
        print(f"burst, new and compiled: median {middles[0]:.1f}, {middles[1]:.1f} ms; ", end="")
        print(f"99 % {tails[0]:.1f}, {tails[1]:.1f} ms")
    for name, column in zip(("median", "99 %"), zip(*ratios, strict=True), strict=True):
        print(f"{args.burst} new schemas, {name}: {statistics.median(column):.2f}")


def measure(llm: LLM, without: LLM, args: argparse.Namespace) -> None:
    """Run the rounds and print the medians."""
    prompts = [
        [(7 * row + 3 * index) % 200 + 10 for index in range(PROMPT_TOKENS)]
        for row in range(args.requests)
    ]
    free = params_of(args.tokens, constrained=False)
    bound = params_of(args.tokens, constrained=True)
    one_free, one_bound = (params_of(1, constrained=value) for value in (False, True))
    for engine, params in ((llm, free), (llm, bound), (without, free)):
        seconds(engine, prompts, params)
    rows = []
    for _ in range(args.rounds):
        times = [
            seconds(engine, prompts, params)
            for engine, params in ((llm, free), (llm, bound), (without, free))
        ]
        first = [seconds(llm, prompts[:1], params) for params in (one_free, one_bound)]
        rows.append((*times, *first))
    columns = list(zip(*rows, strict=True))
    steps_ms = [1000 * statistics.median(column) / args.tokens for column in columns[:3]]
    print(f"step of {args.requests} requests: free {steps_ms[0]:.2f} ms, ", end="")
    print(f"constrained {steps_ms[1]:.2f} ms, engine without grammars {steps_ms[2]:.2f} ms")
    for name, above, below in (("constrained / free", 1, 0), ("free / without grammars", 0, 2)):
        ratios = [row[above] / row[below] for row in rows]
        print(f"{name}: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to ", end="")
        print(f"{max(ratios):.3f}")
    more = statistics.median(row[4] - row[3] for row in rows)
    print(f"first token with a cached grammar: {1000 * more:+.2f} ms")


if __name__ == "__main__":
    main()
