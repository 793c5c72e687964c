"""A torch reference of the trtllm-gen kernels, which compute attention over block tables.

Like the kernels, the reference also reads the values in the unused slots of the last block.

Shape legend: H query heads, K key-value heads, D head size, N blocks, B block size.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from reference_attention import (
    ALIGNMENT,
    HEAD_SIZES,
    Rule,
    attend,
    calls,
    library,
    named,
    numbers,
    require,
)

PAGE_SIZES = (16, 32, 64)

table_launches: dict[int, tuple[str, SimpleNamespace]] = {}
TABLE_TENSORS = (
    "query",
    "key_cache",
    "value_cache",
    "multi_ctas_kv_counter_buffer",
    "block_tables",
    "seq_lens",
    "out",
    "attention_sinks",
    "cum_seq_lens_q",
    "cum_seq_lens_kv",
)

library.define(
    "run_tables(int number, Tensor q, Tensor k, Tensor v, Tensor counters, Tensor tables, "
    "Tensor lens, Tensor(a!) o, Tensor? sinks, Tensor? starts, Tensor? ends) -> ()"
)


def run_tables(kind: str, names: list[str], *args) -> None:
    """Compute attention like a trtllm-gen kernel, as one operation of the device."""
    require(len(args) == len(names), f"{len(args)} arguments for {len(names)} parameters")
    number = next(numbers)
    run = named(names, args)
    table_launches[number] = (kind, run)
    tensors = [getattr(run, name, None) for name in TABLE_TENSORS]
    torch.ops.flashinfer_reference.run_tables(number, *tensors)


def attend_tables(kind: str, run: SimpleNamespace) -> None:
    """Compute attention over block tables on the host. Also read unused slots of the last block."""
    run.q, run.o, run.layout, run.maybe_lse = run.query, run.out, 0, None
    calls.append((kind, vars(run)))
    k_NKBD, v_NKBD = run.key_cache, run.value_cache
    size, head_size = k_NKBD.shape[2:]
    require(head_size in HEAD_SIZES, f"head size {head_size}")
    require(size in PAGE_SIZES, f"page size {size}")
    require(k_NKBD.stride() == v_NKBD.stride() and k_NKBD.stride(-1) == 1, "strides of the cache")
    require(run.q.is_contiguous() and run.o.is_contiguous(), "q or out is strided")
    require(run.q.dtype == k_NKBD.dtype == run.o.dtype, "dtypes differ")
    for name in ("block_tables", "seq_lens"):
        tensor = getattr(run, name)
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name}: int32, dense")
    counters = run.multi_ctas_kv_counter_buffer
    require(not counters.any() and counters.data_ptr() % ALIGNMENT == 0, "counters are not zero")
    need = max(run.batch_size * run.q.shape[1], run.sm_count)
    require(counters.numel() >= 4 * need, "too few counters")
    require(run.bmm2_scale == 1.0 and run.lse is None, "scales or lse")
    sinks_H = run.attention_sinks
    require(sinks_H is None or sinks_H.dtype == torch.float32, "sinks are not float32")
    starts = list(range(run.batch_size + 1))
    if kind == "context":
        require(run.is_causal, "the mask is not causal")
        require(run.cum_seq_lens_q.dtype == run.cum_seq_lens_kv.dtype == torch.int32, "int32")
        starts = run.cum_seq_lens_q.tolist()
        ends = [0, *run.seq_lens.cumsum(0).tolist()]
        require(run.cum_seq_lens_kv.tolist() == ends, "cum_seq_lens_kv differs from seq_lens")
    else:
        require(run.max_q_len == 1, "several queries per run")
    require(starts[0] == 0 and starts[-1] == run.q.shape[0], "q has a different length")
    # A maximum that is too large is slower, but correct.
    require(int(run.seq_lens.max()) <= run.max_kv_len, "max_kv_len")
    require(run.max_kv_len <= size * run.block_tables.shape[1], "the table is too narrow")
    rule = Rule(scale=run.bmm1_scale, window_left=run.window_left, sinks_H=sinks_H)
    for row, length in enumerate(run.seq_lens.tolist()):
        pages = run.block_tables[row, : -(-length // size)].long()
        tokens = slice(starts[row], starts[row + 1])
        require(0 < tokens.stop - tokens.start <= run.max_q_len, "max_q_len")
        keys, values = (x[pages].transpose(1, 2).flatten(0, 1) for x in (k_NKBD, v_NKBD))
        run.o[tokens] = attend(run.q[tokens], keys[:length], values, rule)[0].to(run.o.dtype)


def compute_tables(number: int, *tensors: torch.Tensor | None) -> None:
    """Run the block-table launch of this number on the host. Its tensors are host tensors."""
    kind, run = table_launches[number]
    named_tensors = dict(zip(TABLE_TENSORS, tensors, strict=True))
    attend_tables(kind, SimpleNamespace(**(vars(run) | named_tensors)))


library.impl("run_tables", compute_tables, "CPU")
