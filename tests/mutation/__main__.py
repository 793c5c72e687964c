"""Mutate the reference implementations and check that the suites of the conformance kit detect
them.

    PYTHONPATH=tests python -m mutation [--only PART] [--sample N] [--seed S]

The script prints each surviving mutant, and the kill rate of each file. It exits with code 1 if
fewer mutants of a file are killed than its target requires, or with `--at-least` fewer of all
files together. The script runs one child at a time with low priority.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
from pathlib import Path
from random import Random

from features.preloading import import_libraries
from mutation.mutator import Mutant, make_mutants
from mutation.targets import SKIPPED_FUNCTIONS, TARGETS, Target
from mutation.trial import try_mutant

ROOT = Path(__file__).resolve().parents[2]
FIRST_LIMIT_S = 120.0
"""The time limit of a suite on the original module, in seconds."""


def main() -> int:
    """Run the mutants that the command line selects. Return the exit code."""
    options = read_options()
    os.nice(options.nice)
    import_libraries()
    low = []
    num_tried = num_killed = 0
    for target in TARGETS:
        if options.only not in target.path:
            continue
        tried, killed = judge(target, options)
        num_tried, num_killed = num_tried + tried, num_killed + killed
        rate = killed / max(1, tried)
        if not options.at_least and rate < target.minimum:
            low.append(f"{target.path} {rate:.0%}")
    rate = num_killed / max(1, num_tried)
    print(f"{rate:.1%} of {num_tried} killed in all files", flush=True)
    if rate < options.at_least:
        low.append(f"all files {rate:.0%}")
    print(f"too few killed: {', '.join(low) or 'nowhere'}", flush=True)
    return 1 if low else 0


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("--only", default="", help="mutate only files with this text in their path")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each file; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="minimum share of killed mutants in all files"
    )
    parser.add_argument("--nice", type=int, default=10, help="niceness of the process")
    return parser.parse_args()


def judge(target: Target, options: argparse.Namespace) -> tuple[int, int]:
    """Try the mutants of one file. Return how many were tried and how many killed."""
    source = (ROOT / target.path).read_text("utf-8")
    mutants = choose(make_mutants(source, skipped_functions=SKIPPED_FUNCTIONS), options)
    verdict, alone_s = try_mutant(ast.parse(source), target, str(ROOT), FIRST_LIMIT_S)
    if verdict != "survived":
        raise SystemExit(f"{target.path}: the suites do not pass without a mutation ({verdict})")
    limit_s = 10.0 + 5 * alone_s
    start_s = time.monotonic()
    counts = dict.fromkeys(("killed", "timeout", "survived"), 0)
    for mutant in mutants:
        verdict, _ = try_mutant(mutant.tree, target, str(ROOT), limit_s)
        counts[verdict] += 1
        if verdict == "survived":
            print(f"  survived {Path(target.path).name}:{mutant}", flush=True)
    num_killed = len(mutants) - counts["survived"]
    took_s = time.monotonic() - start_s
    print(
        f"{target.path}: {num_killed} of {len(mutants)} killed ({counts['timeout']} by the time "
        f"limit of {limit_s:.0f} s), {counts['survived']} survived; {took_s:.0f} s",
        flush=True,
    )
    return len(mutants), num_killed


def choose(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    """Return the requested sample of the mutants, in the order of the source text."""
    if not options.sample or options.sample >= len(mutants):
        return mutants
    chosen = Random(options.seed).sample(range(len(mutants)), options.sample)
    return [mutants[index] for index in sorted(chosen)]


if __name__ == "__main__":
    sys.exit(main())
