"""Measure the model runner without a model: host time (µs) of a step of decoding requests.

Run `python bench/runner_step.py`. Method: all requests decode in every step, and each request
starts a new block in every sixteenth step. The model returns random logits of width 256 and has no
attention. "host": the path of synchronous devices, which gathers each step again. "device": the
path of asynchronous devices, on a fake device that copies immediately; its results include torch
operations on the CPU, which are launches on a real device. A step is `execute_model`,
`sample_tokens` and the handle's result; each number is the median of the steps after the first
fifty.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from dovetail.interfaces import FullAttentionSpec, Handle, KVCacheConfig, KVCacheGroup
from dovetail.plan import NewRequest, SchedulerOutput, StepBuilder
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail_torch.positions import PositionTables
from dovetail_torch.runner.device_parts import TORCH_PARTS, DeviceParts
from dovetail_torch.runner.kv_cache import make_attention
from dovetail_torch.runner.loaded_model import LoadedModel
from dovetail_torch.runner.model_runner import ModelRunner
from dovetail_torch.runner.step_limits import StepLimits

VOCAB_SIZE = 256
BLOCK_SIZE = 16
PROMPT_LENGTH = 20
MAX_MODEL_LEN = 4096
NUM_IGNORED = 50
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-k 20": {"temperature": 1.0, "top_k": 20},
    "random": {"temperature": 1.0},
}


class Event:
    """An event that is always complete."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""


class AtOnce:
    """An `AsyncDevice` that copies immediately."""

    def pinned_zeros(self, num_bytes: int) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def record(self) -> Event:
        """Return a complete event."""
        return Event()

    @torch.inference_mode()
    def fetch(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Event:
        """Copy `source` to `target`."""
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return Event()


class NoModel:
    """Returns random logits for any input."""

    def __init__(self, num_rows: int) -> None:
        self._hidden_TD = torch.zeros(num_rows * PROMPT_LENGTH, 1)
        generator = torch.Generator().manual_seed(1)
        self._logits_RV = torch.randn(num_rows, VOCAB_SIZE, generator=generator)

    def forward(self, input_ids_T: torch.Tensor, *_: object) -> torch.Tensor:
        """Return zeros."""
        return self._hidden_TD[: len(input_ids_T)]

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return logits that may be overwritten."""
        return self._logits_RV[: len(hidden_SD)].clone()


def make_runner(num_rows: int, parts: DeviceParts) -> ModelRunner:
    """Return a runner with one KV-cache group that no layer uses."""
    limits = StepLimits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows * PROMPT_LENGTH,
        max_model_len=MAX_MODEL_LEN,
        dtype=torch.float32,
        kv_cache_dtype="float32",
        device=torch.device("cpu"),
    )
    model: Any = NoModel(num_rows)
    loaded = LoadedModel(
        model=model,
        num_layers=0,
        vocab_size=VOCAB_SIZE,
        limits=limits,
        tables=PositionTables(model),
        device_parts=parts,
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="float32")
    group = KVCacheGroup(layer_names=("none",), spec=spec)
    config = KVCacheConfig(num_blocks=8, groups=(group,))
    zeros = partial(torch.zeros, dtype=torch.uint8)
    return ModelRunner(loaded, make_attention(None, {}, config, limits, options={}, zeros=zeros))


def plans(num_rows: int, num_steps: int, settings: dict[str, Any]) -> Iterator[SchedulerOutput]:
    """Yield a plan that runs all prompts, then plans in which every row decodes one token."""
    builder = StepBuilder()
    for row in range(num_rows):
        builder.join(
            NewRequest(
                request_id=str(row),
                row=row,
                generation=1,
                token_ids=array("i", range(PROMPT_LENGTH)),
                num_prompt_tokens=PROMPT_LENGTH,
                sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN, **settings),
                stop_token_ids=frozenset(),
                bad_words_token_ids=(),
                seed=row,
            )
        )
        builder.run(row, 0, PROMPT_LENGTH, samples=True)
    yield builder.build()
    for index in range(PROMPT_LENGTH, PROMPT_LENGTH + num_steps):
        for row in range(-index % BLOCK_SIZE, num_rows, BLOCK_SIZE):
            builder.grow(row, [1])
        builder.run_decodes(array("i", range(num_rows)), array("i", [index]) * num_rows)
        yield builder.build()


def measure(runner: ModelRunner, all_plans: Sequence[SchedulerOutput]) -> float:
    """Return the median µs of a step."""
    durations = []
    for plan in all_plans:
        start = time.perf_counter_ns()
        runner.execute_model(plan)
        output: ModelRunnerOutput | Handle[ModelRunnerOutput] = runner.sample_tokens()
        if not isinstance(output, ModelRunnerOutput):
            output.result()
        durations.append((time.perf_counter_ns() - start) / 1e3)
    return median(durations[NUM_IGNORED:])


def main() -> None:
    """Print one line per number of rows and sampling method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    print("rows  sampling    host µs  device µs")
    for num_rows in settings.rows:
        for name, params in SETTINGS.items():
            figures = []
            for parts in (TORCH_PARTS, replace(TORCH_PARTS, asynchronous=AtOnce())):
                runner = make_runner(num_rows, parts)
                figures.append(measure(runner, list(plans(num_rows, settings.steps, params))))
            print(f"{num_rows:>4}  {name:<10} {figures[0]:>8.0f}  {figures[1]:>9.0f}")


if __name__ == "__main__":
    main()
