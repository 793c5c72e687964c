"""Checks weight offload: tokens with and without it, and how much slower a request is."""

from __future__ import annotations

import time
from typing import Any

from dovetail import LLM, SamplingParams
from gpu.engine_runs import random_prompts
from gpu.report import Report, Task
from gpu.shapes import SHAPES, num_layer_bytes, write_shape

_SHARE = 0.8
"""Share of the layers whose weights stay in host memory."""
_NUM_TOKENS = 12


def run(task: Task, report: Report) -> None:
    """Run the same requests with and without offload. Report equal tokens and the speed."""
    shape = "tiny-deep" if task.small else "qwen3-0.6b"
    model = write_shape(shape, task.folder)
    prompts = random_prompts((5, 40, 17), vocab_size=1000, seed=task.seed)
    num_layers = int(_SHARE * SHAPES[shape]["num_hidden_layers"])
    offload_gb = (num_layers + 0.5) * num_layer_bytes(shape) / (1 << 30)
    expected, usual_s = _run(task, str(model), prompts)
    tokens, offloaded_s = _run(task, str(model), prompts, cpu_offload_gb=offload_gb)
    equal = sum(left == right for left, right in zip(tokens, expected, strict=True))
    report.figure("equal", 100 * equal / len(prompts))
    report.figure("ratio", 100 * usual_s / offloaded_s)


def _run(
    task: Task, model: str, prompts: list[list[int]], **options: float
) -> tuple[list[list[int]], float]:
    """Return the tokens of each prompt, and the seconds of one request."""
    parts: dict[str, Any] = {
        **task.parts.options,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "graph_mode": "none",  # offloaded layers run without graphs
    }
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    with LLM(model, **parts, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        start_s = time.perf_counter()
        llm.generate(prompts[:1], params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
    return [list(output.outputs[0].token_ids) for output in outputs], seconds
