"""Warm-up steps before the first request, on the code path of requests.

Kernels that are compiled on their first call are compiled now. The steps run on row 0, which has no
request yet: its tokens are 0 and its block is block 0, which belongs to no request. A request that
joins the row later overwrites everything that it reads. Does not depend on the model or the
device.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import torch

from dovetail.interfaces import Handle
from dovetail.plan import NewRequest, SchedulerOutput, StepBuilder
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail_torch.sampling import Sampler

_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=0.1),
    SamplingParams(temperature=1.0, top_k=8, top_p=0.9),
)
"""The kinds of sampling: greedy, greedy with changed logits, and random. They use different
kernels."""

_PROMPTS = (8, 256)
"""Prompt lengths, because kernels use different tiles for different lengths. One more token follows
each prompt."""

_WIDEST = SamplingParams(temperature=1.0, top_p=0.9)
"""Sampling parameters that use the whole vocabulary of each row, which needs the most memory."""


class RunsSteps(Protocol):
    """The methods of a model runner that warm-up steps call."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan and run the model."""

    def sample_tokens(self) -> ModelRunnerOutput | Handle[ModelRunnerOutput]:
        """Sample from the logits of the last executed plan."""


def warm_up(runner: RunsSteps, sampler: Sampler, max_num_tokens: int) -> None:
    """Run prompts of several lengths with one more token each, for each kind of sampling.

    Waits for the steps. max_num_tokens: maximum length of a prompt; positions up to it exist.
    """
    for num_tokens in sorted({min(size, max_num_tokens) for size in _PROMPTS}):
        for params in _WAYS:
            sampler.join(_request(num_tokens, params))
            _run(runner, 0, num_tokens)
            _run(runner, num_tokens, 1)
            sampler.leave(0)


def _run(runner: RunsSteps, start: int, num_tokens: int) -> None:
    builder = StepBuilder()
    builder.run(0, start, num_tokens, samples=True)
    runner.execute_model(builder.build())
    output = runner.sample_tokens()
    if not isinstance(output, ModelRunnerOutput):
        output.result()


def draw_for_all(sampler: Sampler, logits_SV: torch.Tensor) -> None:
    """Sample a token for each row of logits with the parameters that need the most memory.

    sampler: a sampler with at least as many rows, all unused.
    """
    rows = range(len(logits_SV))
    for row in rows:
        sampler.join(_request(1, _WIDEST, row))
    sampler.sample(logits_SV, rows)


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
