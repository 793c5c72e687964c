"""Draws from a worker with given sampling parameters, for the sampling cases of its suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from dovetail.interfaces.worker import ModelInfo
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import expect
from dovetail_devkit.worker.rig import WorkerRig

HOT = 100.0
"""A temperature at which logits that differ by less than 100 are nearly equal."""
COLD = 2e-5
"""A temperature that is not greedy and draws the best token all the same."""
NUM_SEEDS = 15
BYSTANDER = 3
"""The row of a greedy request beside those that are tried."""


class Asked(Protocol):
    """A worker that runs, prompts, and what comes of each alone."""

    @property
    def rig(self) -> WorkerRig:
        """The worker in the hands of a test."""

    @property
    def info(self) -> ModelInfo:
        """The facts of its model."""

    @property
    def prompts(self) -> list[list[int]]:
        """What is asked."""

    @property
    def alone(self) -> list[list[int]]:
        """What comes of each prompt alone, greedily."""


def first_tokens(case: Asked, params: SamplingParams, *, num_seeds: int = NUM_SEEDS) -> list[int]:
    """Return the first token for each of some seeds, three rows a step beside a greedy one."""
    rig, prompt = case.rig, case.prompts[1]
    found: list[int] = []
    for first in range(0, num_seeds, BYSTANDER):
        for row in range(BYSTANDER):
            rig.join(row, prompt, params=replace(params, seed=first + row))
        rig.join(BYSTANDER, prompt)
        for row in range(BYSTANDER + 1):
            rig.run(row)
        tokens = rig.step()
        expect(
            tokens.pop(BYSTANDER) == case.alone[1][0],
            f"a greedy row is changed by the sampling parameters of the rows beside it: {params}",
        )
        found += tokens.values()
        rig.clear()
    return found


def generate(
    case: Asked,
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    num_prompt: int = 0,
    num_tokens: int = 1,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> list[int]:
    """Return what comes after `tokens` on row 0, alone; the row leaves again."""
    rig = case.rig
    rig.join(0, tokens, num_prompt=num_prompt, params=params, bad_words=bad_words)
    found = rig.generate(0, num_tokens)
    rig.leave(0)
    return found


def other_tokens(case: Asked, count: int) -> tuple[int, ...]:
    """Return tokens other than the best first one of the case's prompt."""
    best, vocab_size = case.alone[1][0], case.info.vocab_size
    return tuple((best + 7 * (place + 1)) % vocab_size for place in range(count))
