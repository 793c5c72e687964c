"""Compare streams through HTTP with offline generation: throughput, and time to the first token.

Method. `dovetail serve` and an offline `LLM` in this process run on the same checkpoint with the
same number of threads, and are measured in turn. Throughput: N requests at once with the same
lengths, offline as one call of `LLM.generate`, through HTTP as N streamed completions with their
own connections. Time to the first token (TTFT): one request of one token on an idle engine; offline
it is the time of `LLM.generate`. The order within a pair alternates. The script prints the medians,
and the median of each pair's ratio and difference. The clients run in this process, and their CPU
time is part of the results.

    python bench/http_overhead.py [--model DIR] [--clients 16] [--repeats 7] [--first 40]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from serve_vs import WORDS, Peer, complete, start

from dovetail import LLM, SamplingParams

MIN_SHARE = 0.92
MAX_LATER_MS = 3.0
REST_S = 0.1
"""Pause before a measurement, until the threads of the other engine are idle."""
_MAIN = "import sys; from dovetail.cli.app import main; sys.exit(main())"

Run = Callable[[list[str], int], float]
"""Serves prompts with a number of tokens each; returns seconds."""


def prompts_of(seed: str, count: int, words: int) -> list[str]:
    """Return prompts of which no two begin with the same words."""
    texts = (" ".join(WORDS[(n + i) % len(WORDS)] for i in range(words)) for n in range(count))
    return [f"{seed}.{number} {text}" for number, text in enumerate(texts)]


def offline(llm: LLM) -> Run:
    """Return a function that runs prompts with `LLM.generate` and returns the seconds."""

    def run(prompts: list[str], num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    return run


def through_http(peer: Peer) -> Run:
    """Return a function that streams prompts through HTTP and returns the seconds."""

    async def ask(prompts: list[str], num_tokens: int) -> float:
        start = time.perf_counter()
        results = await asyncio.gather(*(complete(peer, text, num_tokens) for text in prompts))
        if num_tokens == 1:
            return results[0][1][0] - results[0][0]
        return time.perf_counter() - start

    return lambda prompts, num_tokens: asyncio.run(ask(prompts, num_tokens))


def pairs(
    runs: tuple[Run, Run], make: Callable[[int], tuple[list[str], int]], count: int
) -> list[tuple[float, float]]:
    """Return the seconds of both runs for each repeat. The order alternates."""
    collected = []
    for number in range(count):
        seconds = [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):
            time.sleep(REST_S)
            prompts, num_tokens = make(2 * number + index)
            seconds[index] = runs[index](prompts, num_tokens)
        collected.append((seconds[0], seconds[1]))
    return collected


def main() -> int:
    """Print the results. Return 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="checkpoint with a tokenizer")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--first", type=int, default=40, help="measurements of TTFT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shared = {"max_num_seqs": args.clients, "max_model_len": 1024, "num_threads": args.threads}
    flags = [word for name, value in shared.items() for word in (f"--{name}", str(value))]
    flags = [word.replace("_", "-") if word.startswith("--") else word for word in flags]
    command = [sys.executable, "-c", _MAIN, "serve", "--model", args.model, "--port", "{port}"]
    peer = start("dovetail", [*command, *flags])
    try:
        llm = LLM(args.model, **shared)
        peer.wait_until_ready()
        runs = offline(llm), through_http(peer)
        for run in runs:
            run(prompts_of("warm", args.clients, args.prompt_words), args.tokens)
        whole = pairs(
            runs,
            lambda n: (prompts_of(str(n), args.clients, args.prompt_words), args.tokens),
            args.repeats,
        )
        first = pairs(runs, lambda n: (prompts_of(f"f{n}", 1, args.prompt_words), 1), args.first)
    finally:
        peer.process.terminate()
        peer.process.wait(60)
    num_tokens = args.clients * args.tokens
    row = {
        "offline_tokens_s": num_tokens / statistics.median(a for a, _ in whole),
        "http_tokens_s": num_tokens / statistics.median(b for _, b in whole),
        "share": statistics.median(a / b for a, b in whole),
        "offline_ttft_ms": 1e3 * statistics.median(a for a, _ in first),
        "http_ttft_ms": 1e3 * statistics.median(b for _, b in first),
        "later_ms": 1e3 * statistics.median(b - a for a, b in first),
    }
    print(f"{args.clients} requests of {args.tokens} tokens, {args.repeats} pairs")
    print(f"throughput: offline {row['offline_tokens_s']:.0f} tokens/s, HTTP", end=" ")
    print(f"{row['http_tokens_s']:.0f}, share {row['share']:.3f}; at least {MIN_SHARE:g}")
    print(
        f"TTFT: offline {row['offline_ttft_ms']:.2f} ms, HTTP {row['http_ttft_ms']:.2f},", end=" "
    )
    print(f"later by {row['later_ms']:.2f}; at most {MAX_LATER_MS:g}")
    if args.json:
        args.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return int(row["share"] < MIN_SHARE or row["later_ms"] > MAX_LATER_MS)


if __name__ == "__main__":
    raise SystemExit(main())
