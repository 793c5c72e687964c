"""Runs engines with fp8 KV caches, and compares their tokens with those of a bf16 cache.

Random models have nearly equal logits, so tokens may differ; the conformance kit tests precision.
"""

from __future__ import annotations

from typing import Any

from dovetail import LLM, SamplingParams
from dovetail.plugins import PluginRegistry
from gpu.engine_runs import random_prompts
from gpu.report import NeedsDeviceError, Report, Task
from gpu.shapes import write_shape

_CACHES = {
    "e4m3_token": ("fp8_e4m3", "token"),
    "e4m3_layer": ("fp8_e4m3", "layer"),
    "e5m2_layer": ("fp8_e5m2", "layer"),
}


def run(task: Task, report: Report) -> None:
    """Generate with every fp8 cache. Report the shares of equal tokens."""
    platform = PluginRegistry().load("platform", task.parts.platform)()
    if "dtype.fp8_e4m3" not in platform.capabilities():
        raise NeedsDeviceError(f"{platform.info.name} does not support fp8")
    model = str(write_shape("tiny", task.folder))
    prompts = random_prompts((5, 40, 130, 17), vocab_size=1000, seed=task.seed)
    expected = _generate(model, prompts, task)
    for name, (dtype, scales) in _CACHES.items():
        tokens = _generate(model, prompts, task, kv_cache_dtype=dtype, kv_cache_scales=scales)
        same = sum(left == right for left, right in zip(tokens, expected, strict=True))
        report.metric(name, 100 * same / len(expected))


def _generate(model: str, prompts: list[list[int]], task: Task, **cache: str) -> list[int]:
    options: dict[str, Any] = {
        **task.parts.options,
        **cache,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "num_gpu_blocks_override": 200,
    }
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(model, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [token for output in outputs for token in output.outputs[0].token_ids]
