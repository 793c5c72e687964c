"""Measure the `cpu` attention backend and compare it with the machine's limits and with torch.

Run `python bench/cpu_attention.py` (`--threads 1,2`, `--cache int8`, `--heads 16/8/128`). The
script needs the members of this repository and a native library.

Method: several layers are called one by one, as in a model. Their KV caches are separate and larger
than the processor's cache, and blocks are in random order. Each result is the median of all rounds
after the first two, with the fastest and the slowest round. The rate of a decode counts the bytes
of keys and values of useful tokens, and is compared with the read probe of the same round. The rate
of a prefill counts 4 H D operations for each pair of a query token and a key token that it attends
to. torch: `scaled_dot_product_attention` on contiguous keys, without a cache and without the time
to gather keys, on the same number of threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from attention_steps import Step, group_context, layer_context, make_batch
from torch.nn.functional import scaled_dot_product_attention

from dovetail.interfaces.kv_cache import SCALE_BYTES, FullAttentionSpec
from dovetail_attn_cpu.backend import CPUAttentionBackend
from dovetail_cpu_kernels import set_num_threads, status
from dovetail_cpu_kernels.probe import read_bandwidth

PROBE_BYTES = 256 << 20
MIN_CACHE_BYTES = 96 << 20
"""Minimum bytes of all layers' caches: three times the last-level cache of a common processor."""
MAX_LAYERS = 48


STEPS = (
    Step(label="decode  1 x 300", contexts=(299,)),
    Step(label="decode  1 x 4096", contexts=(4095,)),
    Step(label="decode 16 x 300", contexts=(299,) * 16),
    Step(label="decode 64 x 300", contexts=(299,) * 64),
    Step(label="prefill 1024", contexts=(0,), query_len=1024),
    Step(label="chunk 256 after 300", contexts=(300,), query_len=256),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of all steps of a run. heads: query heads, key-value heads, head size."""

    heads: tuple[int, int, int]
    block_size: int
    cache_dtype: str
    rounds: int

    @property
    def spec(self) -> FullAttentionSpec:
        """Return the KV-cache spec of a layer."""
        _, num_kv_heads, head_size = self.heads
        return FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=self.cache_dtype,
            scale_bytes=SCALE_BYTES.get(self.cache_dtype, 0),
        )


def make_probe() -> Callable[[], float]:
    """Return a function that reads memory on all threads and returns bytes per second."""
    memory = torch.zeros(PROBE_BYTES, dtype=torch.int8)
    return lambda: read_bandwidth(memory.data_ptr(), memory.numel())


def prepare(step: Step, setting: Setting) -> Callable[[], int]:
    """Return a function that runs the step in every layer, and the number of layers."""
    num_heads, num_kv_heads, head_size = setting.heads
    batch, num_blocks = make_batch(step, setting.block_size)
    spec = setting.spec
    context = layer_context(setting.heads)
    shape = CPUAttentionBackend.kv_cache_shape(num_blocks, spec)
    num_layers = min(MAX_LAYERS, -(-MIN_CACHE_BYTES // (num_blocks * spec.page_size_bytes)))
    dtype = getattr(torch, setting.cache_dtype)
    # Zeros for int8, whose scales would be subnormal; written, so that every page exists.
    value = 0 if dtype == torch.int8 else 1
    caches = [torch.empty(shape, dtype=dtype).fill_(value) for _ in range(num_layers)]
    layers = [CPUAttentionBackend.create_layer(context) for _ in range(num_layers)]
    metadata = CPUAttentionBackend.create_builder(group_context(batch, spec)).build(batch)
    qkv = torch.randn(sum(batch.query_lens), num_heads + 2 * num_kv_heads, head_size)
    q, k, v = qkv.bfloat16().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    out = torch.empty(q.shape, dtype=q.dtype)

    def all_layers() -> int:
        for layer, cache in zip(layers, caches, strict=True):
            layer.forward(q, k, v, cache, metadata, out)
        return num_layers

    return all_layers


def prepare_torch(step: Step, heads: tuple[int, int, int]) -> Callable[[], int]:
    """Return a function that computes attention with torch.

    Requests of equal length are one batch.
    """
    num_heads, num_kv_heads, head_size = heads
    rows, length = len(step.contexts), step.contexts[0] + step.query_len
    q = torch.randn(rows, num_heads, step.query_len, head_size).bfloat16()
    k, v = torch.randn(2, rows, num_kv_heads, length, head_size).bfloat16()
    mask = None
    if step.query_len > 1 and step.contexts[0]:
        mask = torch.ones(step.query_len, length, dtype=torch.bool).tril(step.contexts[0])
    causal = step.query_len > 1 and mask is None

    def attend() -> int:
        scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return 1

    return attend


def work_of(step: Step, setting: Setting) -> tuple[str, float]:
    """Return the unit of a step's rate and the amount per layer: bytes read, or operations."""
    num_heads, _, head_size = setting.heads
    if step.query_len == 1:
        token_bytes = setting.spec.page_size_bytes // setting.block_size
        return "GB/s", sum(context + 1 for context in step.contexts) * token_bytes
    seen = sum(c + t + 1 for c in step.contexts for t in range(step.query_len))
    return "GFLOP/s", 4.0 * num_heads * head_size * seen


def measure(calls: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Call the functions alternately. Return the ns per layer by name and measured round."""
    results: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            num_layers = call()
            results[name].append((time.perf_counter_ns() - start) / num_layers)
    return {name: times[2:] for name, times in results.items()}


def report(step: Step, setting: Setting, num_threads: int) -> str:
    """Return a line with the results of one step."""
    probe, rates = make_probe(), []

    def run_probe() -> int:
        rates.append(probe())
        return 1

    times = measure({"probe": run_probe, "cpu": prepare(step, setting)}, setting.rounds)
    # In a separate process: torch's threads spin after each call on the cores of the team.
    times |= measure({"torch": prepare_torch(step, setting.heads)}, setting.rounds)
    unit, work = work_of(step, setting)
    own, peer = times["cpu"], median(times["torch"])
    bandwidth = median(rates[2:]) / 1e9
    share = f"{work / median(own) / bandwidth:>5.0%} of {bandwidth:.0f} GB/s" * (unit == "GB/s")
    return (
        f"{num_threads} thr  {step.label:<20}{median(own) / 1e3:>8.0f} µs "
        f"({min(own) / 1e3:.0f} - {max(own) / 1e3:.0f})"
        f"{work / median(own):>8.1f} {unit:<8}{share:<18}"
        f" torch {peer / 1e3:>7.0f} µs = {peer / median(own):>5.1f} x"
    )


def main() -> None:
    """Print a line for every number of threads and step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--heads", default="16/8/128", help="query / key-value heads / head size")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--cache", default="bfloat16", choices=sorted({"bfloat16", "int8"}))
    parser.add_argument("--steps", default="", help="only steps with this text in their label")
    arguments = parser.parse_args()
    num_heads, num_kv_heads, head_size = map(int, arguments.heads.split("/"))
    setting = Setting(
        heads=(num_heads, num_kv_heads, head_size),
        block_size=arguments.block_size,
        cache_dtype=arguments.cache,
        rounds=arguments.rounds,
    )
    print(f"{arguments.heads} heads, blocks of {setting.block_size}, cache {setting.cache_dtype},")
    print(f"torch {torch.__version__}, level {status().level}, {setting.rounds} rounds")
    steps = [step for step in STEPS if arguments.steps in step.label]
    with torch.inference_mode():
        for num_threads in map(int, arguments.threads.split(",")):
            torch.set_num_threads(num_threads)
            set_num_threads(num_threads)
            for step in steps:
                print(report(step, setting, num_threads), flush=True)


if __name__ == "__main__":
    main()
