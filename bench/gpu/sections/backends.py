"""Compares two attention backends on the demo model, in float32, by the margin rule.

One backend generates; the other computes the same tokens as prompts and is the reference. If there
is only one backend, it is compared with itself, with prompts in different chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail import SamplingParams
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer
from dovetail_demo_model import model_dir
from dovetail_demo_model.tasks import TASKS, held_out_set
from gpu.engine_runs import EngineOracle, report_agreement, run_engine
from gpu.report import Report, Task
from parity.margin_rule import measure

_DEVICE = ({"attention_backend": "triton"}, {"attention_backend": "torch"})
_ALONE: tuple[dict[str, Any], dict[str, Any]] = ({"max_num_batched_tokens": 32}, {})
_PER_TASK = 8


def run(task: Task, report: Report) -> None:
    """Generate tokens with one backend. Compare their probabilities with the other backend's."""
    answering, reading = _ALONE if len(task.parts.backends) == 1 else _DEVICE
    prompts = _prompts(1 if task.small else _PER_TASK, few=task.small)
    params = SamplingParams(temperature=0, max_tokens=8 if task.small else 48, ignore_eos=True)
    common: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "attention_backend": task.parts.backends[0],
    }
    ran = run_engine(model_dir(), prompts, params, task.parts, **{**common, **answering})
    sequences = [request.token_ids for request in ran.requests.values()]
    oracle = EngineOracle(model_dir(), sequences, task.parts, **{**common, **reading})
    agreement = measure(ran.requests, ran.recorded, oracle)
    report_agreement([agreement], report)
    try:
        agreement.check()
    except AssertionError as error:
        report.fail(f"{answering} against {reading}: {error}")


def _prompts(per_task: int, *, few: bool) -> list[list[int]]:
    """Return questions of the demo model as token ids."""
    tokenizer = HuggingFaceTokenizer.from_directory(Path(model_dir()))
    tasks = list(TASKS.values())[: 3 if few else None]
    texts = [text for task in tasks for text, _ in held_out_set(task, per_task, 71)]
    return [tokenizer.encode(text) for text in texts]
