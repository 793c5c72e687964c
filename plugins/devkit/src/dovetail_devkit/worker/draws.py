"""Samples tokens from a worker with given sampling parameters, for the sampling cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from dovetail.interfaces.worker import ModelInfo
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import expect
from dovetail_devkit.worker.harness import WorkerHarness

HOT = 100.0
"""A temperature at which tokens whose logits differ by less than 100 are almost equally likely."""
COLD = 2e-5
"""A temperature above 0 at which the most likely token is always sampled."""
NUM_SEEDS = 15
BYSTANDER = 3
"""The row of a greedy request that runs in the same steps as the tested rows."""


class SamplingSubject(Protocol):
    """The interface of a started worker, prompts, and each prompt's greedy tokens alone."""

    @property
    def harness(self) -> WorkerHarness:
        """The harness that drives the worker."""

    @property
    def info(self) -> ModelInfo:
        """The result of the worker's `get_model_info`."""

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts."""

    @property
    def alone(self) -> list[list[int]]:
        """The greedy tokens of each prompt without other prompts."""


def first_tokens(
    case: SamplingSubject, params: SamplingParams, *, num_seeds: int = NUM_SEEDS
) -> list[int]:
    """Return the first tokens for several seeds. A step has three seeded rows and a greedy row."""
    harness, prompt = case.harness, case.prompts[1]
    tokens_found: list[int] = []
    for first in range(0, num_seeds, BYSTANDER):
        for row in range(BYSTANDER):
            harness.join(row, prompt, params=replace(params, seed=first + row))
        harness.join(BYSTANDER, prompt)
        for row in range(BYSTANDER + 1):
            harness.run(row)
        tokens = harness.step()
        expect(
            tokens.pop(BYSTANDER) == case.alone[1][0],
            f"the sampling parameters of other rows change the token of a greedy row: {params}",
        )
        tokens_found += tokens.values()
        harness.clear()
    return tokens_found


def generate(
    case: SamplingSubject,
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    num_prompt: int = 0,
    num_tokens: int = 1,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> list[int]:
    """Generate the tokens that follow `tokens`, in row 0 without other rows. Release the row."""
    harness = case.harness
    harness.join(0, tokens, num_prompt=num_prompt, params=params, bad_words=bad_words)
    generated = harness.generate(0, num_tokens)
    harness.leave(0)
    return generated


def other_tokens(case: SamplingSubject, count: int) -> tuple[int, ...]:
    """Return `count` tokens that differ from the greedy first token of the case's prompt."""
    best, vocab_size = case.alone[1][0], case.info.vocab_size
    return tuple((best + 7 * (index + 1)) % vocab_size for index in range(count))
