"""Runs engines with a worker that records logits, in the form that the margin rule needs.

Dimensions: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail import LLM, SamplingParams
from dovetail.engine.input.input_processor import user_request_id
from dovetail.plugins import PluginRegistry
from gpu.device_parts import DeviceParts
from gpu.report import Report, Task
from parity.margin_rule import MIN_SHARE, TOLERANCE, Agreement, Sequenced
from parity.recording import RecordedRun, Recording

BASE_OPTIONS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 2000,
    "max_num_seqs": 32,
}


_NUM_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The results of a run. num_preemptions: number of preempted requests."""

    requests: dict[str, Sequenced]
    recorded: list[RecordedRun]
    num_preemptions: int = 0


def recording_worker(parts: DeviceParts) -> type:
    """Return a worker class of the device that records logits."""
    base = PluginRegistry().load("worker", parts.worker)
    return type("RecordingDeviceWorker", (Recording, base), {})


def random_prompts(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens with the given lengths."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


def run_engine(
    model: str | Path,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    parts: DeviceParts,
    **options: Any,
) -> Ran:
    """Generate from token ids, with sampling for the second half of the prompts. Return the run.

    options: engine options that override `BASE_OPTIONS`.
    """
    kwargs = {**BASE_OPTIONS, **parts.options, "worker_cls": recording_worker(parts), **options}
    half = (len(prompts) + 1) // 2
    sampling = [params] * half + [_sampled(params, seed) for seed in range(len(prompts) - half)]
    with LLM(str(model), **kwargs) as llm:
        outputs = llm.generate([list(item) for item in prompts], sampling, use_tqdm=False)
        (recorded,) = llm.llm_engine.collective_rpc("take_recorded")
        stats = llm.llm_engine.last_stats
    requests = {
        output.request_id: Sequenced(
            token_ids=(*prompt, *output.outputs[0].token_ids),
            num_prompt=len(prompt),
            num_cached=output.num_cached_tokens,
            greedy=item.temperature == 0,
        )
        for prompt, item, output in zip(prompts, sampling, outputs, strict=True)
    }
    num_preemptions = stats.num_preemptions if stats else 0
    return Ran(requests=requests, recorded=recorded, num_preemptions=num_preemptions)


def _sampled(params: SamplingParams, seed: int) -> SamplingParams:
    """Return parameters for random sampling. Greedy outputs of random models soon repeat."""
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos
    )


def run_shape(
    task: Task, model: Path, prompts: Sequence[Sequence[int]], **options: Any
) -> tuple[list[list[int]], float]:
    """Run a model with random weights, without graphs.

    Return the tokens of each prompt, and the seconds of one request.
    """
    parts: dict[str, Any] = {
        **task.parts.options,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "graph_mode": "none",
    }
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    inputs = [list(prompt) for prompt in prompts]
    with LLM(str(model), **parts, **options) as llm:
        outputs = llm.generate(inputs, params, use_tqdm=False)
        start_s = time.perf_counter()
        llm.generate(inputs[:1], params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


class EngineOracle:
    """Uses another engine as the reference, which computes the logits after each given token."""

    def __init__(
        self,
        model: str | Path,
        sequences: Iterable[Sequence[int]],
        parts: DeviceParts,
        **options: Any,
    ) -> None:
        """Compute all sequences as prompts in an engine with `options`."""
        distinct = list(dict.fromkeys(map(tuple, sequences)))
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        ran = run_engine(model, distinct, params, parts, **options)
        pieces: dict[str, list[RecordedRun]] = {}
        for run in ran.recorded:
            pieces.setdefault(user_request_id(run.request_id), []).append(run)
        self._known = {
            request.token_ids[: request.num_prompt]: torch.cat(
                [run.logits for run in sorted(pieces[name], key=lambda run: run.start)]
            )
            for name, request in ran.requests.items()
        }

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after each token, [T, V]."""
        return self._known[tuple(token_ids)]


def report_agreement(agreements: Sequence[Agreement], report: Report) -> None:
    """Report the worst of several comparisons, and a failure if the margin rule is violated."""
    positions = sum(agreement.positions for agreement in agreements)
    clear = sum(agreement.qualifying + agreement.tokens_qualifying for agreement in agreements)
    equal = sum(agreement.qualifying_equal + agreement.tokens_equal for agreement in agreements)
    shares = [
        agreement.qualifying / agreement.positions
        for agreement in agreements
        if agreement.positions
    ]
    report.metric(
        "max_error", max((agreement.max_error for agreement in agreements), default=float("nan"))
    )
    report.metric("qualify", 100 * min(shares, default=float("nan")))
    report.metric("equal", 100 * equal / clear if clear else float("nan"))
    report.note(
        f"{positions} positions, {sum(item.tokens for item in agreements)} greedy tokens; "
        f"tolerance {TOLERANCE:g}, clear of ties by ten times that in {MIN_SHARE:.0%} at least"
    )
