"""Run random scheduler programs for 200,000 steps: every policy on every cache shape.

    PYTHONPATH=tests python -m soak.random_programs [--steps N] [--processes P] [--only NUMBER]

The commit selects the programs, so that each commit is tested with new ones. The script prints the
counts of events and the speed. Exits with code 1 at the first violated rule and prints the number
of the program, so that `--only` can repeat it. Also exits with code 1 after a full run in which
events are too rare.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from itertools import count, islice

from features.suite import commit
from soak.programs import SHAPES, Tally, make_program, play, policy_names

FULL_STEPS = 200_000
PROGRAM_STEPS = 450
MINIMUM = dict.fromkeys(("preemptions", "prefix hits", "aborts", "evictions"), 2_000)
MIN_MEAN_GRANTS = 20
REPORT_EVERY_S = 60.0


def main() -> int:
    """Run the programs that the command line selects. Return the exit code."""
    options = read_options()
    os.nice(options.nice)
    policies = policy_names()
    if options.only is not None:
        print(show(play(make_program(options.only, policies, num_steps=PROGRAM_STEPS))))
        return 0
    begun_s = time.perf_counter()
    try:
        tally = play_all(policies, options.steps, options.processes, Reporter(begun_s))
    except AssertionError as broken:
        print(f"BROKEN: {broken}", flush=True)
        return 1
    took_s = time.perf_counter() - begun_s
    print(show(tally), f"{took_s:.0f} s, {tally.counts['steps'] / took_s:.0f} steps/s", sep="\n")
    missing = find_missing(tally) if options.steps >= FULL_STEPS else []
    print(f"too few: {', '.join(missing) or 'nothing'}", flush=True)
    return 1 if missing else 0


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m soak.random_programs", description=__doc__)
    parser.add_argument("--steps", type=int, default=FULL_STEPS, help="minimum number of steps")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument("--only", type=int, help="run only this program")
    parser.add_argument("--nice", type=int, default=10, help="niceness of the process")
    return parser.parse_args()


class Reporter:
    """Prints the progress of a run regularly."""

    def __init__(self, begun_s: float) -> None:
        self._begun_s = self._reported_s = begun_s

    def __call__(self, tally: Tally) -> None:
        """Record the progress."""
        now_s = time.perf_counter()
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            print(f"{now_s - self._begun_s:.0f} s: {tally.counts['steps']} steps", flush=True)


def play_all(
    policies: list[str], num_steps: int, num_processes: int, report: Callable[[Tally], None]
) -> Tally:
    """Run programs for `num_steps` in all. Raise AssertionError for a violated rule.

    Every pair of policy and shape is run equally often.
    """
    num_pairs = len(policies) * len(SHAPES)
    tally, numbers = Tally(), count(first_number(commit(), num_pairs))
    with ProcessPoolExecutor(num_processes) as pool:
        while tally.counts["steps"] < num_steps:
            for item in _play_some(pool, policies, islice(numbers, num_pairs)):
                tally.add(item)
                report(tally)
    return tally


def first_number(commit_id: bytes, num_pairs: int) -> int:
    """Return the number of the first program at a commit, one of the first pair."""
    return int.from_bytes(sha256(commit_id).digest()[:4]) * num_pairs


def _play_some(
    pool: ProcessPoolExecutor, policies: list[str], numbers: Iterator[int]
) -> Iterator[Tally]:
    return pool.map(partial(_play_number, policies), numbers)


def _play_number(policies: list[str], number: int) -> Tally:
    return play(make_program(number, policies, num_steps=PROGRAM_STEPS))


def find_missing(tally: Tally) -> list[str]:
    """Return the kinds of events that were too rare for a full run, with their counts."""
    counts = tally.counts
    missing = [
        f"{name} {counts[name]}" for name, minimum in MINIMUM.items() if counts[name] < minimum
    ]
    if counts["grants"] < MIN_MEAN_GRANTS * counts["steps"]:
        missing.append(f"grants {counts['grants'] / counts['steps']:.1f} a step")
    return missing


def show(tally: Tally) -> str:
    """Return a summary of a few lines."""
    counts = tally.counts
    lines = [", ".join(f"{number} {name}" for name, number in counts.items())]
    lines.append(f"{counts['grants'] / counts['steps']:.1f} grants a step")
    for title, steps in (("policies", tally.by_policy), ("shapes", tally.by_shape)):
        lines.append(f"{title}: {', '.join(f'{name} {steps[name]}' for name in sorted(steps))}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
