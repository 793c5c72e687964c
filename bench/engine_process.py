"""Measure the cost of a separate engine process: throughput and time to the first token.

Method: a random-weight Llama of 160 M parameters in bfloat16, created once under `.bench/` from a
fixed seed. An in-process engine and an engine in a separate process run alternately, with the same
number of threads, after one warm-up each. The order within a pair alternates. Throughput: output
tokens per second of 16 simultaneous greedy requests from `cases.py` (128 prompt tokens, 64 output
tokens). First token: the time of `LLM.generate` for one request of 32 prompt tokens and one output
token, on an idle engine. The script prints medians and quartiles, and the median cost of the
process over the pairs.

    python bench/engine_process.py [--model PATH] [--repeats 9] [--first 200] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from cases import CASES, Case
from checkpoints import make_checkpoint

from dovetail import LLM, SamplingParams

MODEL = "llama-160m"
MAX_SLOWER = 0.05
MAX_LATER_MS = 1.0
PROMPT_LEN = 32
REST_S = 0.02
"""Wait before a first token is requested, until the threads of the other engine are idle."""


def make_engine(path: Path, threads: int, *, engine_process: bool) -> LLM:
    """Return an engine for the model at `path`, without a tokenizer and without a prefix cache."""
    return LLM(
        str(path),
        skip_tokenizer_init=True,
        num_threads=threads,
        enable_prefix_caching=False,
        engine_process=engine_process,
    )


def throughput(llm: LLM, case: Case, repeat: int) -> float:
    """Return output tokens per second of one run."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        for length in case.output_lens
    ]
    prompts = case.prompts_of(repeat)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begin
    if [len(out.outputs[0].token_ids) for out in outputs] != list(case.output_lens):
        raise RuntimeError("a request has the wrong number of tokens")
    return sum(case.output_lens) / took


def first_token_ms(llm: LLM, case: Case, repeat: int) -> float:
    """Return the milliseconds from the call to the single requested token."""
    prompt = case.prompts_of(repeat)[0][:PROMPT_LEN]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    time.sleep(REST_S)
    begin = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return (time.perf_counter() - begin) * 1e3


def alternate(
    measure: Callable[[LLM, Case, int], float], engines: tuple[LLM, LLM], case: Case, repeats: int
) -> list[tuple[float, float]]:
    """Return the results of the first and the second engine for the same prompts, as pairs."""
    pairs = []
    for repeat in range(-1, repeats):
        order = engines if repeat % 2 else engines[::-1]
        rates = {id(llm): measure(llm, case, repeat + 1) for llm in order}
        if repeat >= 0:  # the previous run was the warm-up
            pairs.append((rates[id(engines[0])], rates[id(engines[1])]))
    return pairs


def spread(values: list[float]) -> str:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:9.2f}  ({low:.2f} to {high:.2f})"


def main() -> int:
    """Print the table. Return 1 if the cost of the process exceeds the target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, help="another checkpoint")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--first", type=int, default=200, help="measurements of TTFT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    path = arguments.model or make_checkpoint(MODEL, Path(".bench"))
    with (
        make_engine(path, arguments.threads, engine_process=False) as here,
        make_engine(path, arguments.threads, engine_process=True) as there,
    ):
        engines = here, there
        first = alternate(first_token_ms, engines, CASES["decode1"], arguments.first)
        rates = alternate(throughput, engines, CASES["conc16"], arguments.repeats)
    slower = statistics.median(1 - there / here for here, there in rates)
    later_ms = statistics.median(there - here for here, there in first)
    print(f"{path.name}, {arguments.threads} threads; medians and quartiles")
    for name, pairs in (("tokens/s, 16 requests", rates), ("ms to the first token", first)):
        print(f"{name}, in one process:    {spread([here for here, _ in pairs])}")
        print(f"{name}, in its own:        {spread([there for _, there in pairs])}")
    print(f"throughput lost: {100 * slower:.1f} % (at most {100 * MAX_SLOWER:.0f} %)")
    print(f"first token later by: {later_ms:.2f} ms (at most {MAX_LATER_MS} ms)")
    if arguments.json:
        report = {"throughput": rates, "first_ms": first, "slower": slower, "later_ms": later_ms}
        arguments.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return int(slower > MAX_SLOWER or later_ms > MAX_LATER_MS)


if __name__ == "__main__":
    raise SystemExit(main())
