"""The report of `--verbose` about the start: the phases, and the memory use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.engine.async_llm import AsyncLLM

MIB = 2**20
WEIGHTS, ACTIVATIONS = ("load_model",), ("size_cache",)
"""The phases in which the memory for weights and for activations is first used."""

PLAN = (
    ("weights", "--dtype, --quantization, --tensor-parallel-size"),
    ("activations", "--max-num-batched-tokens, --max-num-seqs"),
    ("KV cache", "--gpu-memory-utilization, --kv-cache-memory-bytes, --num-gpu-blocks-override"),
)
"""The rows of the memory plan, with the options that change them."""

Phases = Sequence[tuple[str, float, int]]


def start_report(llm: AsyncLLM) -> Iterator[str]:
    """Yield the lines of the report."""
    info = llm.facts
    total_s = sum(seconds for _, seconds, _ in info.phases)
    yield f"The engine started in {total_s:.2f} s:"
    for name, seconds, grown in info.phases:
        yield f"  {name:<14} {seconds:7.2f} s {grown / MIB:+9.1f} MiB"
    one_process = llm.config.parallel.tensor_parallel_size == 1
    sizes = (
        _growth(info.phases, WEIGHTS) if one_process else None,
        _growth(info.phases, ACTIVATIONS) if one_process else None,
        info.cache_bytes,
    )
    yield "Memory (weights and activations: growth of the engine's process; cache: reserved):"
    for (name, options), size in zip(PLAN, sizes, strict=True):
        shown = "not measured" if size is None else f"{size / MIB:.1f} MiB"
        yield f"  {name:<14} {shown:>14}   change with {options}"
    cached = llm.config.scheduler.max_num_seqs * llm.max_model_len
    yield (
        f"  max_model_len {llm.max_model_len}, max_num_seqs {llm.config.scheduler.max_num_seqs}: "
        f"at most {cached} tokens are in use at the same time."
    )


def _growth(phases: Phases, names: Sequence[str]) -> int:
    return max(0, sum(grown for name, _, grown in phases if name in names))
