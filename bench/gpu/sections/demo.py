"""Runs the demo model on held-out questions. Its tasks grade the answers."""

from __future__ import annotations

from dovetail import LLM, SamplingParams
from dovetail_demo_model.tasks import TASKS, held_out_set
from gpu.report import Report, Task

_PER_TASK = 100
_SMALL_PER_TASK = 2
_SEED = 71
_MAX_TOKENS = 112


def run(task: Task, report: Report) -> None:
    """Generate answers to all questions in one call, greedily, in the model's own dtype."""
    per_task = _SMALL_PER_TASK if task.small else _PER_TASK
    requested = [
        (item, text) for item in TASKS.values() for text, _ in held_out_set(item, per_task, _SEED)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)
    chats = [[{"role": "user", "content": text}] for _, text in requested]
    with LLM(
        "demo",
        **task.parts.options,
        num_gpu_blocks_override=4000,
        use_tqdm_on_load=False,
    ) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
        plugins = llm.llm_engine.plugins.chosen
    right = sum(
        output.outputs[0].finish_reason == "stop" and item.check(text, output.outputs[0].text)
        for (item, text), output in zip(requested, outputs, strict=True)
    )
    report.metric("right", 100 * right / len(requested), note=f"{right} of {len(requested)}")
    parts = {
        item.kind: item.name for item in plugins if item.kind in ("attention", "ops", "worker")
    }
    report.note(", ".join(f"{kind} by {name}" for kind, name in sorted(parts.items())))
