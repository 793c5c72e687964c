"""Compares logits and tokens of all graph modes with transformers, and measures their speed.

Requests have different lengths, so that decodes, prefills and mixed batches occur; the margin rule
decides. The `parity` section uses the default mode.
"""

from __future__ import annotations

import time
from typing import Any

from dovetail import LLM, SamplingParams
from gpu.engine_runs import BASE_OPTIONS, random_prompts, report_agreement, run_engine
from gpu.report import Report, Task
from gpu.sections.parity import KINDS
from parity.checkpoints import VOCAB_SIZE, make_checkpoint
from parity.margin_rule import measure

MODES = ("full_and_piecewise", "piecewise", "full", "none")
_LENGTHS = (5, 40, 17, 1, 90, 33)
_SMALL_LENGTHS = (5, 33, 1)


def run(task: Task, report: Report) -> None:
    """Generate with every mode. Report the agreement with transformers, and the relative speed."""
    checkpoint = make_checkpoint(next(iter(KINDS)), task.folder, task.seed, KINDS)
    lengths = _SMALL_LENGTHS if task.small else _LENGTHS
    prompts = random_prompts(lengths, vocab_size=VOCAB_SIZE, seed=task.seed)
    params = SamplingParams(temperature=0, max_tokens=4 if task.small else 48, ignore_eos=True)
    agreements = []
    for mode in MODES[:1] if task.small else MODES:
        options = _options(task, mode)
        ran = run_engine(checkpoint.folder, prompts, params, task.parts, **options)
        agreement = measure(ran.requests, ran.recorded, checkpoint.logits)
        agreements.append(agreement)
        try:
            agreement.check()
        except AssertionError as error:
            report.fail(f"graph_mode={mode!r}: {error}")
    report_agreement(agreements, report)
    if not task.small:
        graphs, eager = (
            _rate(str(checkpoint.folder), mode, prompts[0], params, task)
            for mode in (MODES[0], MODES[-1])
        )
        report.metric("ratio", 100 * graphs / eager, note=f"{graphs:,.0f} and {eager:,.0f} /s")


def _options(task: Task, mode: str) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 32 if task.small else 96,
        "max_graph_size": min(task.parts.max_graph_size, 64),
        "graph_mode": mode,
    }


def _rate(model: str, mode: str, prompt: list[int], params: SamplingParams, task: Task) -> float:
    """Return the tokens per second of one request, after a warm-up."""
    seconds = 0.0
    with LLM(model, **{**BASE_OPTIONS, **task.parts.options, **_options(task, mode)}) as llm:
        for _ in range(2):
            start = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            seconds = time.perf_counter() - start
    return (params.max_tokens or 0) / seconds
