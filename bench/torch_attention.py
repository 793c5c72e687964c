"""Measure the `torch` attention backend on the CPU: µs per layer and builder call, bfloat16.

Run `python bench/torch_attention.py`. Method: several layers, each with its own cache, are called
one by one, as in a model, so that no data of the previous call is in the processor's
cache; blocks are in random order. After two warm-up rounds, each result is the median of the
rounds, with the fastest and the slowest round. "ragged" batches have context lengths evenly
distributed from a quarter to the full length. GiB/s counts the keys and values that decodes must
read, once each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from attention_steps import Step, group_context, layer_context, make_batch

from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_torch.backend import TorchAttentionBackend

BLOCK_SIZE = 16
NUM_LAYERS = 4
DTYPE = torch.bfloat16
HEADS = ((12, 4, 64), (16, 8, 128))

STEPS = (
    *(
        Step(label=f"decode {rows:>2} x {length}", contexts=(length - 1,) * rows)
        for length in (128, 512)
        for rows in (1, 16, 64)
    ),
    *(
        Step(
            label=f"decode {rows:>2} x {length} ragged",
            contexts=tuple(length // 4 + length * 3 * i // (4 * rows) for i in range(rows)),
        )
        for length, rows in ((512, 16), (1024, 64))
    ),
    Step(label="prefill 1024", contexts=(0,), query_len=1024),
    Step(label="chunk 256 after 768", contexts=(768,), query_len=256),
)


def measure(call: Callable[[], object], rounds: int) -> list[float]:
    """Return the µs of each of `rounds` calls, after two warm-up calls."""
    durations = []
    for _ in range(rounds + 2):
        start = time.perf_counter_ns()
        call()
        durations.append((time.perf_counter_ns() - start) / 1e3)
    return durations[2:]


def run(step: Step, heads: tuple[int, int, int], rounds: int) -> str:
    """Return a line with the results of one step."""
    num_heads, num_kv_heads, head_size = heads
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=head_size, dtype="bfloat16"
    )
    batch, num_blocks = make_batch(step, BLOCK_SIZE)
    builder = TorchAttentionBackend.create_builder(group_context(batch, spec))
    layer = TorchAttentionBackend.create_layer(layer_context(heads))
    shape = TorchAttentionBackend.kv_cache_shape(num_blocks, spec)
    caches = [torch.randn(shape).to(DTYPE) for _ in range(NUM_LAYERS)]
    q, k, v = (
        torch.randn(sum(batch.query_lens), num_heads + 2 * num_kv_heads, head_size)
        .to(DTYPE)
        .split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    )
    out = torch.empty_like(q)
    builds = measure(lambda: builder.build(batch), rounds)
    metadata = builder.build(batch)

    def all_layers() -> None:
        for cache in caches:
            layer.forward(q, k, v, cache, metadata, out)

    layers = [duration / NUM_LAYERS for duration in measure(all_layers, rounds)]
    read_bytes = sum(batch.seq_lens) * spec.page_size_bytes // BLOCK_SIZE
    rate = read_bytes / median(layers) * 1e6 / 2**30
    return (
        f"{num_heads:>2}/{num_kv_heads}/{head_size:<3} {step.label:<25}"
        f"{median(layers):>9.0f} ({min(layers):>6.0f} - {max(layers):>6.0f})"
        f"{median(builds):>8.0f} ({min(builds):>5.0f} - {max(builds):>5.0f})"
        + (f"{rate:>8.1f}" if step.query_len == 1 else "")
    )


def main() -> None:
    """Print one line for every step and head configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds")
    print(f"{'heads':<9} {'step':<25}{'µs per layer':>10}{'µs per build':>25}{'GiB/s':>23}")
    with torch.inference_mode():
        for heads in HEADS:
            for step in STEPS:
                print(run(step, heads, arguments.rounds))


if __name__ == "__main__":
    main()
