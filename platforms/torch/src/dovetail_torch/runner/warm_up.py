"""Warm-up steps before the first request, on the code path of requests.

Kernels that are compiled on their first call are compiled now. The steps run on rows that have no
request yet: their tokens are 0 and their block is block 0, which belongs to no request. A request
that gets such a row later overwrites everything that it reads. This module does not depend on the
model or the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch

from dovetail.interfaces import Handle
from dovetail.plan import NewRequest, SchedulerOutput, StepBuilder
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail_torch.sampling import GrammarMask, Sampler

_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=0.1),
    SamplingParams(temperature=1.0, top_k=8, top_p=0.9),
)
"""The kinds of sampling: greedy, greedy with changed logits, and random. They use different
kernels."""

STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 8),),
    ((8, 1),),
    ((0, 50),),
    ((0, 256),),
    ((256, 1),),
    ((8, 1), (0, 100)),
    ((256, 1), (0, 256)),
)
"""Steps as runs of (context length, number of tokens), one row for each run.

Attention kernels differ for short and long runs, short and long contexts, and steps that mix them.
"""

_SAMPLED_STEPS = 2
"""The first of the steps that run with each kind of sampling."""

_MANY_ROWS = 257
"""A number of rows for which sampling kernels use more programs."""

_WIDEST = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.1, logprobs=20)
"""Sampling parameters that need the most memory: they use the whole vocabulary of each row."""


class RunsSteps(Protocol):
    """The methods of a model runner that warm-up steps call."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan and run the model."""

    def sample_tokens(self) -> ModelRunnerOutput | Handle[ModelRunnerOutput]:
        """Sample from the logits of the last executed plan."""


def warm_up(runner: RunsSteps, sampler: Sampler, num_rows: int, max_num_tokens: int) -> None:
    """Run steps of different shapes with each kind of sampling, and wait for them.

    num_rows: number of rows. max_num_tokens: maximum number of tokens of a step; positions up to it
    exist.
    """
    for number, params in enumerate(_WAYS):
        many = ((0, 1),) * min(_MANY_ROWS, num_rows, max_num_tokens)
        for step in (*STEPS[: None if number == 0 else _SAMPLED_STEPS], many):
            runs = _limited(step, num_rows, max_num_tokens)
            for row, (start, num_tokens) in enumerate(runs):
                sampler.join(_request(start + num_tokens, params, row))
            _run(runner, runs)
            for row in range(len(runs)):
                sampler.leave(row)


def run_step(runner: RunsSteps, sampler: Sampler, num_tokens: int, row_tokens: int) -> None:
    """Run a step with greedy sampling on unused rows, and wait for it.

    row_tokens: maximum number of tokens of a row.
    """
    counts = [row_tokens] * (num_tokens // row_tokens)
    if num_tokens % row_tokens:
        counts.append(num_tokens % row_tokens)
    for row, count in enumerate(counts):
        sampler.join(_request(count, _WAYS[0], row))
    _run(runner, [(0, count) for count in counts])
    for row in range(len(counts)):
        sampler.leave(row)


def _limited(
    step: Sequence[tuple[int, int]], num_rows: int, max_num_tokens: int
) -> list[tuple[int, int]]:
    """Return the requests of a warm-up step that fit the runner's rows and token limit."""
    runs = []
    for start, num_tokens in step[:num_rows]:
        left = max_num_tokens - sum(count for _, count in runs)
        num_tokens = min(num_tokens, left)
        start = min(start, max_num_tokens - num_tokens)
        if num_tokens:
            runs.append((start, num_tokens))
    return runs


def _run(runner: RunsSteps, runs: Sequence[tuple[int, int]]) -> None:
    builder = StepBuilder()
    for row, (start, num_tokens) in enumerate(runs):
        builder.run(row, start, num_tokens, samples=True)
    runner.execute_model(builder.build())
    output = runner.sample_tokens()
    if not isinstance(output, ModelRunnerOutput):
        output.result()


def draw_for_all(sampler: Sampler, logits_SV: torch.Tensor) -> None:
    """Sample a token for each row of logits with the code path that needs the most memory.

    Each row has a grammar that allows all tokens. sampler: a sampler with at least as many rows,
    all unused.
    """
    num_rows, vocab_size = logits_SV.shape
    rows = range(num_rows)
    for row in rows:
        sampler.join(_request(1, _WIDEST, row))
    row_bytes = 4 * -(-vocab_size // 32)
    size, device = (num_rows, row_bytes), logits_SV.device
    grammar = GrammarMask(
        index_G=torch.arange(num_rows, device=device),
        bits_GB=torch.full(size, 255, dtype=torch.uint8, device=device),
    )
    sampler.sample(logits_SV, rows, grammar)


def _request(num_tokens: int, params: SamplingParams, row: int = 0) -> NewRequest:
    return NewRequest(
        request_id=f"warm-up {row}",
        row=row,
        generation=0,
        token_ids=array("i", bytes(4 * num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling_params=params,
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=0,
    )
