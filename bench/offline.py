"""Compare offline throughput with transformers' `generate`, in one run on the same checkpoints.

Method: two random-weight checkpoints in bfloat16 (Qwen3-0.6B's shape; a Llama of 125 M parameters),
created once under `.bench/` from a fixed seed. The cases are those of `cases.py` (one request, 16
at once, 64 mixed): greedy, EOS ignored, fixed numbers of tokens. Both engines use the same threads
in one process. After one warm-up each, their runs alternate. The script prints the medians of
output tokens per second, their spread, and the median of the ratios between paired runs.
transformers runs one left-padded batch with its default cache and SDPA attention; the tokens that
it generates beyond a request's own number are not counted.

    python bench/offline.py [--models llama-160m …] [--repeats 5] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from checkpoints import SHAPES, make_checkpoint

from dovetail import LLM, SamplingParams

OFFLINE_CASES = ("decode1", "conc16", "varied64")


class Ours:
    """Runs a case with Dovetail."""

    def __init__(self, path: Path, threads: int) -> None:
        self._llm = LLM(
            str(path), skip_tokenizer_init=True, num_threads=threads, enable_prefix_caching=False
        )

    def generate(self, case: Case) -> None:
        """Generate exactly the requested number of tokens for each prompt of the case."""
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            for length in case.output_lens
        ]
        outputs = self._llm.generate(case.prompts, params, use_tqdm=False)
        actual = [len(output.outputs[0].token_ids) for output in outputs]
        if actual != list(case.output_lens):
            raise RuntimeError("a request has the wrong number of tokens")


class Theirs:
    """Runs a case with transformers."""

    def __init__(self, path: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def generate(self, case: Case) -> None:
        """Run one left-padded batch until its longest request is finished."""
        width, length = max(map(len, case.prompts)), max(case.output_lens)
        ids = torch.zeros(len(case.prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(case.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
            )


def timed(engine: Ours | Theirs, case: Case) -> float:
    """Return output tokens per second of one run."""
    begin = time.perf_counter()
    engine.generate(case)
    return sum(case.output_lens) / (time.perf_counter() - begin)


def compare(ours: Ours, theirs: Theirs, case: Case, repeats: int) -> dict[str, Any]:
    """Run both engines alternately and return medians, spreads and the median ratio."""
    ours.generate(case)
    theirs.generate(case)
    pairs = [(timed(ours, case), timed(theirs, case)) for _ in range(repeats)]
    our_rates, their_rates = zip(*pairs, strict=True)
    return {
        "case": case.name,
        "ours": statistics.median(our_rates),
        "ours_spread": [min(our_rates), max(our_rates)],
        "theirs": statistics.median(their_rates),
        "theirs_spread": [min(their_rates), max(their_rates)],
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def main() -> int:
    """Print the table. Return 1 unless Dovetail is faster in every case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--cases", nargs="+", choices=OFFLINE_CASES, default=OFFLINE_CASES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="also write the results to this file")
    arguments = parser.parse_args()
    rows = []
    print(f"torch {torch.__version__}, {arguments.threads} threads; output tokens per second")
    print(
        f"{'model':<18} {'case':<10} {'dovetail':>9} {'spread':>15} {'transformers':>13} "
        f"{'spread':>15} {'ratio':>6}"
    )
    for name in arguments.models:
        path = make_checkpoint(name, Path(".bench"))
        ours, theirs = Ours(path, arguments.threads), Theirs(path, arguments.threads)
        for case_name in arguments.cases:
            row = compare(ours, theirs, CASES[case_name], arguments.repeats)
            rows.append({"model": name, **row})
            print(
                f"{name:<18} {case_name:<10} {row['ours']:>9.1f} {_span(row['ours_spread']):>15} "
                f"{row['theirs']:>13.1f} {_span(row['theirs_spread']):>15} {row['ratio']:>6.2f}",
                flush=True,
            )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return not all(row["ratio"] > 1.0 for row in rows)


def _span(spread: list[float]) -> str:
    return f"{spread[0]:.1f}–{spread[1]:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
