"""Measure the `triton` ops on a GPU and compare them with torch operations.

Run `python bench/gpu/ops.py` (`--json FILE`, `--device cuda`, `--small`). Without a GPU, the script
reports this and exits with code 3.

Method: calls are captured in a graph and replayed, so that the metrics exclude the host's work;
calls that cannot be captured are timed one by one. Each metric is the median of the rounds without
the first two; bytes are the bytes that must be read and written once. The host time of a call is
measured separately.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.interfaces.ops import DrawColumns, Ops, StepColumns
from dovetail_ops_triton.ops import TritonOps
from dovetail_torch.layers.torch_ops import TorchOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.metrics import Metric, graph_s, median_s, report_metrics

NUM_CALLS = 20
NUM_HOST_CALLS = 200
VOCAB_SIZE = 151_936
EPS = 1e-6
Call = Callable[[], object]
THEIRS = TorchOps()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model's layer. heads: query heads, key-value heads, head size."""

    label: str
    hidden: int
    inner: int
    heads: tuple[int, int, int]


SMALL = Shape(label="0.6 B", hidden=1024, inner=3072, heads=(16, 8, 128))
LARGE = Shape(label="8 B", hidden=4096, inner=12288, heads=(32, 8, 128))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An operation in Triton and in torch. num_bytes: bytes read and written, or 0 if unknown."""

    name: str
    ours: Call
    theirs: Call
    num_bytes: int = 0
    their_graph: bool = True


def time_call(call: Call, *, in_graph: bool = True) -> float:
    """Return the seconds that a call takes on the device."""
    call()
    if not in_graph:
        torch.cuda.synchronize()
        return median_s(call)

    def several() -> None:
        for _ in range(NUM_CALLS):
            call()

    return graph_s(several) / NUM_CALLS


def host_s(call: Call) -> float:
    """Return the seconds that a call keeps the host busy."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NUM_HOST_CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / NUM_HOST_CALLS


def layer_comparisons(
    ours: Ops, shape: Shape, num_tokens: int, device: torch.device
) -> Iterator[Comparison]:
    """Yield the operations of a layer."""
    num_heads, num_kv_heads, head_size = shape.heads
    factory_kwargs = {"dtype": torch.bfloat16, "device": device}
    x = torch.randn(num_tokens, shape.hidden, **factory_kwargs)
    residual, weight = torch.zeros_like(x), torch.ones(shape.hidden, **factory_kwargs)
    wide = torch.randn(num_tokens, 2 * shape.inner, **factory_kwargs)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, **factory_kwargs)
    q, k, _ = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    positions = torch.arange(num_tokens, device=device)
    cos_sin = torch.randn(num_tokens, head_size, device=device)
    head_weight = torch.ones(head_size, **factory_kwargs)

    def comparison(what: str, call: Callable[[Ops], object], num_numbers: int) -> Comparison:
        return Comparison(
            name=f"{what}, {shape.label}, {counted(num_tokens, 'token')}",
            ours=lambda: call(ours),
            theirs=lambda: call(THEIRS),
            num_bytes=2 * num_numbers,
        )

    turned = q.numel() + k.numel()
    yield comparison("rms_norm", lambda ops: ops.rms_norm(x, weight, EPS), 2 * x.numel())
    yield comparison("rms_norm of q", lambda ops: ops.rms_norm(q, head_weight, EPS), 2 * q.numel())
    yield comparison(
        "add_rms_norm", lambda ops: ops.add_rms_norm(x, residual, weight, EPS), 4 * x.numel()
    )
    yield comparison("silu_and_mul", lambda ops: ops.silu_and_mul(wide), 3 * wide.numel() // 2)
    yield comparison(
        "rotary_embedding",
        lambda ops: ops.rotary_embedding(q, k, positions, cos_sin),
        2 * turned + 2 * cos_sin.numel(),
    )


def counted(number: int, noun: str) -> str:
    """Return "1 token" or "64 tokens"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def sampling_comparisons(
    ours: TritonOps, num_rows: int, device: torch.device
) -> Iterator[Comparison]:
    """Yield the sampling operations, greedy and random. Torch samples by sorting."""
    logits = torch.randn(num_rows, VOCAB_SIZE, device=device) * 3
    num_bytes = logits.numel() * 4
    yield Comparison(
        name=f"best_tokens, {counted(num_rows, 'row')}",
        ours=lambda: ours.best_tokens(logits),
        theirs=lambda: logits.argmax(-1),
        num_bytes=num_bytes,
    )
    for label, top_k, top_p in (
        ("temperature", VOCAB_SIZE, 1.0),
        ("top-k 50", 50, 1.0),
        ("top-p 0.9", VOCAB_SIZE, 0.9),
        ("top-k 50, top-p 0.9", 50, 0.9),
    ):
        columns = draw_columns(num_rows, top_k, top_p, device)
        yield Comparison(
            name=f"draw_tokens, {label}, {counted(num_rows, 'row')}",
            ours=lambda columns=columns: ours.draw_tokens(logits, columns),
            theirs=lambda k=top_k, p=top_p: draw_by_sorting(logits, k, p),
            num_bytes=num_bytes,
            their_graph=False,
        )


def draw_columns(num_rows: int, top_k: int, top_p: float, device: torch.device) -> DrawColumns:
    """Return columns for rows with the same sampling parameters, at temperature 0.8."""
    counted = torch.arange(num_rows, device=device)
    return DrawColumns(
        temperature_R=torch.full((num_rows,), 0.8, device=device),
        top_k_R=torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
        top_p_R=torch.full((num_rows,), top_p, device=device),
        min_p_R=torch.zeros(num_rows, device=device),
        seeds_R=counted,
        positions_R=counted,
    )


def draw_by_sorting(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Sample tokens with torch operations."""
    probs = (logits / 0.8).softmax(-1)
    if top_k == VOCAB_SIZE and top_p == 1.0:
        return probs.multinomial(1)
    probs, order = probs.sort(dim=-1, descending=True)
    probs[:, top_k:] = 0
    probs = probs / probs.sum(-1, keepdim=True)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)
    return order.gather(1, probs.multinomial(1))


def input_comparison(ours: TritonOps, num_rows: int, device: torch.device) -> Comparison:
    """Return the comparison of `prepare_inputs` for a step in which all rows decode."""
    length, size = 4096, 16
    counted = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    whole = {"dtype": torch.int64, "device": device}
    columns = StepColumns(
        rows_R=counted[:-1],
        starts_R=torch.full((num_rows,), length // 2, dtype=torch.int32, device=device),
        query_start_R1=counted,
        token_ids_RL=torch.ones(num_rows, length, dtype=torch.int32, device=device),
        block_tables=(torch.ones(num_rows, length // size, dtype=torch.int32, device=device),),
        block_sizes=(size,),
        input_ids_T=torch.empty(num_rows, **whole),
        positions_T=torch.empty(num_rows, **whole),
        seq_lens_R=torch.empty(num_rows, dtype=torch.int32, device=device),
        slots_T=(torch.empty(num_rows, **whole),),
        block_tables_RM=(torch.empty(num_rows, length // size, dtype=torch.int32, device=device),),
        num_tokens=num_rows,
        longest=1,
    )
    return Comparison(
        name=f"prepare_inputs, {num_rows} decodes",
        ours=lambda: ours.prepare_inputs(columns),
        theirs=lambda: THEIRS.prepare_inputs(columns),
    )


def comparisons(device: torch.device, *, small: bool) -> Iterator[Comparison]:
    """Yield the comparisons of all operations."""
    ours = TritonOps()
    for shape in (SMALL,) if small else (SMALL, LARGE):
        for num_tokens in (256,) if small else (1, 256, 8192):
            yield from layer_comparisons(ours, shape, num_tokens, device)
    for num_rows in (1, 256):
        yield from sampling_comparisons(ours, num_rows, device)
        yield input_comparison(ours, num_rows, device)


def measure(device: torch.device, small: bool) -> Iterator[Metric]:
    """Yield the metrics of all comparisons."""
    for comparison in comparisons(device, small=small):
        ours = time_call(comparison.ours)
        theirs = time_call(comparison.theirs, in_graph=comparison.their_graph)
        host_us = host_s(comparison.ours) * 1e6
        note = f"torch {theirs * 1e6:.1f} us ({host_us:.0f} us of host time)"
        yield Metric(name=comparison.name, value=ours * 1e6, unit="us", note=note)
        if comparison.num_bytes:
            note = f"torch {comparison.num_bytes / theirs / 1e9:.0f} GB/s"
            yield Metric(
                name=comparison.name,
                value=comparison.num_bytes / ours / 1e9,
                unit="GB/s",
                note=note,
            )


def main() -> int:
    """Measure and print the metrics, and write them to a file. Return the exit code."""
    return report_metrics("bench/gpu/ops.py", __doc__.split("\n")[0], measure)


if __name__ == "__main__":
    sys.exit(main())
