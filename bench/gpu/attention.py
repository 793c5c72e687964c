"""Measure the `triton` attention backend on a GPU, relative to memory bandwidth and matrix rate.

Run `python bench/gpu/attention.py` (`--json FILE`, `--device cuda`, `--small`). Without a GPU, the
script reports this and exits with code 3.

Method: several layers with separate caches, together at least four times the GPU's last-level
cache, are called one by one, as in a model, with blocks in random order; the calls are captured in
a graph, so that the metrics exclude the host's work. Each metric is the median of the rounds
without the first two. The rate of a decode counts the bytes of keys and values of useful tokens. It
is compared with the rate of a copy in the same process, which counts bytes read and written. The
rate of a prefill counts 4 H D operations for each pair of a query token and a key token that it
attends to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
    RotaryArgs,
)
from dovetail.interfaces.kv_cache import SCALE_BYTES, FullAttentionSpec
from dovetail_attn_triton.backend import FP8, TritonAttentionBackend
from dovetail_torch.layers import TorchOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.metrics import Metric, graph_s, median_s, report_metrics

BLOCK_SIZE = 16
COPY_BYTES = 2 << 30
MIN_CACHE_BYTES = 256 << 20
MIN_BYTES_OF_TARGET = 128 << 20
"""Bytes of keys and values per layer above which decode must reach its share of the copy rate."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step to measure. heads: query heads, key-value heads, head size."""

    label: str
    num_rows: int
    context_len: int
    query_len: int = 1
    heads: tuple[int, int, int] = (32, 8, 128)
    cache_dtype: str = "bfloat16"

    @property
    def seq_len(self) -> int:
        """Return the number of tokens of a request after the step."""
        return self.context_len + self.query_len

    @property
    def spec(self) -> FullAttentionSpec:
        """Return the KV-cache spec of a layer."""
        return FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=self.heads[1],
            head_size=self.heads[2],
            dtype=self.cache_dtype,
            scale_bytes=SCALE_BYTES.get(self.cache_dtype, 0),
        )

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of keys and values that a layer reads."""
        return self.num_rows * self.seq_len * self.spec.page_size_bytes // BLOCK_SIZE

    @property
    def num_operations(self) -> int:
        """Return the number of multiplications and additions of a layer."""
        num_heads, _, head_size = self.heads
        pairs = self.query_len * self.context_len + self.query_len * (self.query_len + 1) // 2
        return 4 * num_heads * head_size * self.num_rows * pairs


STEPS = (
    Step(label="decode 256 x 1024", num_rows=256, context_len=1023),
    Step(label="decode 1 x 32768", num_rows=1, context_len=32767),
    Step(label="prefill 8192", num_rows=1, context_len=0, query_len=8192),
)
MORE_STEPS = (
    Step(label="decode 256 x 1024, 16/8 heads", num_rows=256, context_len=1023, heads=(16, 8, 128)),
    Step(label="decode 64 x 4096", num_rows=64, context_len=4095),
    Step(label="decode 12 x 8192", num_rows=12, context_len=8191),
    Step(label="decode 64 x 4096, head size 64", num_rows=64, context_len=4095, heads=(32, 8, 64)),
    Step(label="decode 256 x 2048, fp8", num_rows=256, context_len=2047, cache_dtype=FP8),
    Step(label="decode 1 x 1024", num_rows=1, context_len=1023),
    Step(label="prefill 16 x 1024", num_rows=16, context_len=0, query_len=1024),
    Step(label="chunk 2048 after 8192", num_rows=1, context_len=8192, query_len=2048),
)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy within the device's memory."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_s(lambda: target.copy_(source))


def make_batch(step: Step, device: torch.device) -> tuple[AttentionBatch, int]:
    """Return the batch of the step, with shuffled blocks, and the number of cache blocks."""
    rows, width = step.num_rows, -(-step.seq_len // BLOCK_SIZE)
    table = torch.randperm(rows * width, device=device).view(rows, width).int() + 1
    positions = torch.arange(step.context_len, step.seq_len, device=device)
    slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(rows + 1, device=device) * step.query_len
    batch = AttentionBatch(
        query_start_R1=starts.int(),
        seq_lens_R=torch.full((rows,), step.seq_len, dtype=torch.int32, device=device),
        block_table_RM=table,
        slot_mapping_T=slots.flatten(),
        query_lens=(step.query_len,) * rows,
        seq_lens=(step.seq_len,) * rows,
    )
    return batch, rows * width + 1


def make_caches(step: Step, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
    """Return enough caches to exceed the device's last-level cache several times."""
    shape = TritonAttentionBackend.kv_cache_shape(num_blocks, step.spec)
    count = max(1, -(-MIN_CACHE_BYTES // step.cache_bytes))
    if step.cache_dtype != FP8:
        return [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(count)]
    # As fp8 values, bytes of 56 are 1.0; as a float32 scale, four of them are near 4e-5.
    return [
        torch.full(shape, 56, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        for _ in range(count)
    ]


def time_layer(step: Step, device: torch.device) -> float:
    """Return the seconds per layer, including rotary embedding and the write to the cache."""
    batch, num_blocks = make_batch(step, device)
    num_heads, num_kv_heads, head_size = step.heads
    num_tokens = sum(batch.query_lens)
    group = AttentionGroupContext(
        spec=step.spec,
        device=device,
        max_num_seqs=step.num_rows,
        max_num_batched_tokens=num_tokens,
        max_model_len=step.seq_len,
    )
    context = AttentionLayerContext(
        layer_name="bench",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        dtype=torch.bfloat16,
        device=device,
    )
    caches = make_caches(step, num_blocks, device)
    layers = [TritonAttentionBackend.create_layer(context) for _ in caches]
    metadata = TritonAttentionBackend.create_builder(group).build(batch)
    size = (num_tokens, num_heads + 2 * num_kv_heads, head_size)
    qkv = torch.randn(size, dtype=torch.bfloat16, device=device)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    cos_sin = torch.randn(step.seq_len, head_size, device=device)
    positions = torch.arange(num_tokens, device=device) % step.seq_len
    rotary_args = RotaryArgs(ops=TorchOps(), positions_T=positions, cos_sin_PR=cos_sin)

    def all_layers() -> None:
        for layer, cache in zip(layers, caches, strict=True):
            layer.forward(q, k, v, cache, metadata, out, rotary_args)

    all_layers()  # compiles, and creates the work list
    return graph_s(all_layers) / len(layers)


def measure(steps: tuple[Step, ...], device: torch.device) -> Iterator[Metric]:
    """Yield the metrics one by one, the share of the copy rate last."""
    copy = copy_bandwidth(device)
    yield Metric(name="copy", value=copy / 1e9, unit="GB/s", note="bytes read and written")
    shares = []
    for step in steps:
        seconds = time_layer(step, device)
        note = f"{seconds * 1e6:.1f} us per layer"
        if step.query_len > 1:
            rate = step.num_operations / seconds
            yield Metric(name=step.label, value=rate / 1e12, unit="TFLOP/s", note=note)
            continue
        rate = step.cache_bytes / seconds
        note += f", {100 * rate / copy:.0f} % of the copy rate"
        yield Metric(name=step.label, value=rate / 1e9, unit="GB/s", note=note)
        if step.cache_bytes >= MIN_BYTES_OF_TARGET:
            shares.append(100 * rate / copy)
    note = f"worst of {len(shares)} cases of at least {MIN_BYTES_OF_TARGET >> 20} MiB per layer"
    yield Metric(name="decode_copy_share", value=min(shares), unit="%", note=note)


def measure_device(device: torch.device, small: bool) -> Iterator[Metric]:
    """Yield the metrics of all steps, or of the first ones if `small`."""
    torch.manual_seed(0)
    return measure(STEPS if small else STEPS + MORE_STEPS, device)


def main() -> int:
    """Measure and print the metrics, and write them to a file. Return the exit code."""
    return report_metrics("bench/gpu/attention.py", __doc__.split("\n")[0], measure_device)


if __name__ == "__main__":
    sys.exit(main())
