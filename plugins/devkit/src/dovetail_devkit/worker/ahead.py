"""Checks of workers that return handles: a step may start before the previous one has a result.

A request's tokens must not depend on when, how often and by which thread results are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from dovetail_devkit.expectation import expect
from dovetail_devkit.worker.harness import ASYNC_OUTPUT, LaunchedStep, WorkerHarness

_NUM_STEPS = 5


class StartedWorker(Protocol):
    """The interface of a started worker, prompts, and the tokens that each prompt gets alone."""

    @property
    def harness(self) -> WorkerHarness:
        """The test harness that sends plans to the worker."""

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts."""

    @property
    def alone(self) -> list[list[int]]:
        """The tokens of each prompt without other prompts."""


def check_ahead(case: StartedWorker) -> None:
    """Check that a step can be launched before the result of the previous step is read.

    Does nothing for a worker that does not provide "async_output".
    """
    harness = case.harness
    if ASYNC_OUTPUT not in harness.worker.provides:
        return
    _check_in_turn(case)
    harness.clear()
    _check_all_late(case)
    harness.clear()
    _check_reused_row(case)


def _check_in_turn(case: StartedWorker) -> None:
    """Run with two steps in flight, while another thread reads the results."""
    harness = case.harness
    harness.join(0, case.prompts[2])
    harness.join(1, case.prompts[3])
    actual: dict[int, list[int]] = {0: [], 1: []}

    def take(step: LaunchedStep) -> None:
        for row, token in harness.settle(step).items():
            actual[row].append(token)

    with ThreadPoolExecutor(max_workers=1) as reader:
        out = _launch(harness, (0, 1))
        for turn in range(1, _NUM_STEPS):
            following = _launch(harness, (1, 0) if turn % 2 else (0, 1))
            reader.submit(take, out).result()
            out = following
        reader.submit(take, out).result()
    _expect(case, 2, actual[0], "Two steps were in flight.")
    _expect(case, 3, actual[1], "Two steps were in flight.")


def _check_all_late(case: StartedWorker) -> None:
    """Read all results after the last step, in reversed order."""
    harness = case.harness
    harness.join(2, case.prompts[1])
    steps = [_launch(harness, (2,)) for _ in range(_NUM_STEPS)]
    actual = [harness.settle(step)[2] for step in steps[::-1]][::-1]
    _expect(case, 1, actual, "The results were read in reversed order, after the last step.")


def _check_reused_row(case: StartedWorker) -> None:
    """Check that a row can be reused before the token of its last request is read."""
    harness = case.harness
    harness.join(0, case.prompts[3])
    first = _launch(harness, (0,))
    harness.leave(0)
    harness.join(0, case.prompts[0])
    second = _launch(harness, (0,))
    _expect(case, 3, [harness.settle(first)[0]], "The row was reused before this result was read.")
    how = "The prompt joined the row before the result of the previous request was read."
    _expect(case, 0, [harness.settle(second)[0], *harness.generate(0, 1)], how)


def _launch(harness: WorkerHarness, rows: Sequence[int]) -> LaunchedStep:
    for row in rows:
        harness.run(row)
    return harness.launch()


def _expect(case: StartedWorker, index: int, tokens: list[int], how: str) -> None:
    expected = case.alone[index][: len(tokens)]
    expect(
        tokens == expected,
        f"a prompt of {len(case.prompts[index])} tokens gets {tokens}, but without other prompts "
        f"it gets {expected}. {how}",
    )
