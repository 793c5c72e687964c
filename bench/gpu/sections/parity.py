"""Compares logits and tokens with transformers on the host, for models created here.

In float32 it uses the margin rule, with a large cache and with a small one that causes preemptions.
In bf16 it measures the KL divergence from float32 and the top-1 agreement (share of positions with
the same most likely token). It does so for each attention backend of the platform.

Dimensions: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail import SamplingParams
from dovetail.engine.input.input_processor import user_request_id
from dovetail.errors import PluginError
from gpu.engine_runs import Ran, random_prompts, report_agreement, run_engine
from gpu.report import Report, Task, describe_error
from parity.checkpoints import LLAMA3_ROPE, VOCAB_SIZE, Checkpoint, make_checkpoint
from parity.margin_rule import Agreement, measure

KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama: llama3 rope, 8/2 heads of 64": (
        "Llama",
        {"rope_parameters": LLAMA3_ROPE, "num_attention_heads": 8, "head_dim": 64},
    ),
    "qwen3: tied, 4/4 heads of 128": (
        "Qwen3",
        {"num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "mistral: window 37, 8/2 heads of 80": (
        "Mistral",
        {"sliding_window": 37, "num_attention_heads": 8, "head_dim": 80, "num_hidden_layers": 3},
    ),
    "qwen2: biases, 6/1 heads of 32": (
        "Qwen2",
        {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 1},
    ),
}
_LENGTHS = (17, 600, 1, 333, 16, 2, 100, 15) * 2
_SMALL_LENGTHS = (17, 1, 40)
_NUM_BFLOAT16 = 2
"""Models that are also run in bf16."""
_FEW_BLOCKS = 60
"""Blocks of the small cache, 16 tokens each. The longest request needs 42 blocks, all need 210."""


def run(task: Task, report: Report) -> None:
    """Run every backend on every model."""
    actual = _Found()
    for name in list(KINDS)[: 1 if task.small else None]:
        folder = task.folder / name.partition(":")[0]
        folder.mkdir()
        checkpoint = make_checkpoint(name, folder, task.seed, KINDS)
        for backend in task.parts.backends:
            try:
                _compare(checkpoint, backend, task, report, actual)
            except PluginError as rejection:
                report.note(f"{name}: {' '.join(str(rejection).split())}")
            except Exception as error:  # a failure must not affect the other models
                report.fail(f"{name}, {backend}: {describe_error(error)}")
    if not actual.agreements:
        report.fail("no attention backend supports any of the models")
        return
    report_agreement(actual.agreements, report)
    if actual.distances:
        report.metric("bf16_kl", max(kl for kl, _ in actual.distances))
        report.metric("bf16_top1", 100 * min(top1 for _, top1 in actual.distances))


@dataclass(kw_only=True)
class _Found:
    """Results of all runs. distances: KL divergence and top-1 agreement."""

    agreements: list[Agreement] = field(default_factory=list)
    distances: list[tuple[float, float]] = field(default_factory=list)


def _compare(
    checkpoint: Checkpoint, backend: str, task: Task, report: Report, actual: _Found
) -> None:
    options = {"attention_backend": backend}
    actual.agreements += _in_float32(checkpoint, task, options, report)
    if checkpoint.name in list(KINDS)[:_NUM_BFLOAT16]:
        actual.distances.append(_in_bfloat16(checkpoint, task, options))


def _in_float32(
    checkpoint: Checkpoint, task: Task, options: Mapping[str, Any], report: Report
) -> Iterable[Agreement]:
    situations: list[dict[str, Any]] = [{}]
    if not task.small:
        situations.append({"num_gpu_blocks_override": _FEW_BLOCKS, "enable_prefix_caching": True})
    for situation in situations:
        ran = _ask(checkpoint, task, dtype="float32", **{**options, **situation})
        agreement = measure(ran.requests, ran.recorded, checkpoint.logits)
        try:
            agreement.check()
        except AssertionError as error:
            where = f"{checkpoint.name}, {options['attention_backend']}"
            report.fail(f"{where}, {ran.num_preemptions} preemptions: {error}")
        yield agreement


def _ask(checkpoint: Checkpoint, task: Task, **options: Any) -> Ran:
    lengths = _SMALL_LENGTHS if task.small else _LENGTHS
    prompts = random_prompts(lengths, vocab_size=VOCAB_SIZE, seed=task.seed)
    params = SamplingParams(temperature=0, max_tokens=8 if task.small else 48, ignore_eos=True)
    budget = 64 if task.small else 256
    return run_engine(
        checkpoint.folder,
        prompts,
        params,
        task.parts,
        max_model_len=664,
        max_num_batched_tokens=budget,
        block_size=16,
        **options,
    )


def _in_bfloat16(
    checkpoint: Checkpoint, task: Task, options: Mapping[str, Any]
) -> tuple[float, float]:
    """Return (mean KL divergence from float32, share of positions with the same top token)."""
    ran = _ask(checkpoint, task, dtype="bfloat16", **options)
    divergence, same, count = 0.0, 0, 0
    for run in ran.recorded:
        reference_NV = checkpoint.logits(ran.requests[user_request_id(run.request_id)].token_ids)
        reference_NV = reference_NV[run.start : run.start + len(run.logits)].log_softmax(-1)
        ours_NV = run.logits.log_softmax(-1)
        terms_NV = reference_NV.exp() * (reference_NV - ours_NV)
        divergence += float(terms_NV.sum())
        same += int((ours_NV.argmax(-1) == reference_NV.argmax(-1)).sum())
        count += len(run.logits)
    return (divergence / count, same / count) if count else (float("nan"), 0.0)
