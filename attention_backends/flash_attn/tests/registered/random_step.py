"""One step of random requests whose contexts are in the cache, for tests of a single layer.

Dimensions: H query heads, K key-value heads, D head size, B block size, R requests, M width of the
block table.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from cpu_backends import BLOCK_SIZE, CPU, OnCpu

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_devkit.attention.reference import reference_attention

B, H, K, D = BLOCK_SIZE, 4, 2, 64
SPEC = FullAttentionSpec(block_size=B, num_kv_heads=K, head_size=D, dtype="bfloat16")
RUNS = ((2 * B, 1), (B, 1), (3, B + 2), (0, 5))
"""(context, queries) of each row."""
DECODES = ((2 * B, 1), (B - 1, 1), (0, 1))
TOLERANCE = 0.02


class RandomStep:
    """Random requests, and a cache in which all slots that no context uses are NaN."""

    def __init__(self, runs=RUNS, spec=SPEC):
        generator = torch.Generator().manual_seed(7)
        self.runs, self.spec = runs, spec
        size = spec.block_size
        shape = (H + 2 * K, spec.head_size)
        dtype = getattr(torch, spec.dtype)
        self.qkv = [torch.randn(sum(run), *shape, generator=generator).to(dtype) for run in runs]
        counts = [-(-sum(run) // size) for run in runs]
        starts = [1 + sum(counts[:row]) for row in range(len(runs))]
        self.table_RM = torch.zeros(len(runs), max(counts) + 1, dtype=torch.int32)
        self.cache = torch.full(OnCpu.kv_cache_shape(1 + sum(counts), spec), torch.nan, dtype=dtype)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.table_RM[row, :count] = torch.arange(start, start + count)
        for row, (context, _) in enumerate(runs):
            parts = self.qkv[row][:context].split([H, K, K], 1)[1:]
            slots = self.slots(row, range(context))
            for index, x in enumerate(parts):
                self.cache[slots // size, index, slots % size] = x
        self.out_of_window()

    def out_of_window(self):
        """Reassign the blocks before the window of each request to another request."""
        window, size = self.spec.sliding_window, self.spec.block_size
        if window:
            for row, (context, _) in enumerate(self.runs):
                self.table_RM[row, : max(0, context + 1 - window) // size] = 0

    def slots(self, row, positions):
        size = self.spec.block_size
        at = torch.tensor(list(positions), dtype=torch.int64)
        return self.table_RM[row, at // size].long() * size + at % size

    def batch(self):
        query_lens = [n for _, n in self.runs]
        slots = [self.slots(row, range(c, c + n)) for row, (c, n) in enumerate(self.runs)]
        return AttentionBatch(
            query_start_R1=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens_R=torch.tensor([sum(run) for run in self.runs], dtype=torch.int32),
            block_table_RM=self.table_RM,
            slot_mapping_T=torch.cat(slots),
            query_lens=query_lens,
            seq_lens=[sum(run) for run in self.runs],
        )

    def builder(self, backend=OnCpu, **options):
        context = AttentionGroupContext(
            spec=self.spec,
            device=CPU,
            max_num_seqs=len(self.runs),
            max_num_batched_tokens=10 * B,
            max_model_len=100 * B,
            options=options,
        )
        return backend.create_builder(context)

    def layer(self, backend=OnCpu, **changes):
        return backend.create_layer(self.layer_context(**changes))

    def layer_context(self, **changes):
        context = AttentionLayerContext(
            layer_name="layers.3.attn",
            num_heads=H,
            num_kv_heads=K,
            head_size=self.spec.head_size,
            scale=0.2,
            dtype=getattr(torch, self.spec.dtype),
            device=CPU,
            sliding_window=self.spec.sliding_window,
        )
        return replace(context, **changes)

    def attend(self, layer, metadata, out=None):
        parts = [x[context:] for x, (context, _) in zip(self.qkv, self.runs, strict=True)]
        q, k, v = torch.cat(parts).split([H, K, K], 1)
        out = torch.full_like(q, torch.nan) if out is None else out
        layer.forward(q, k, v, self.cache, metadata, out)
        return out

    def check(self, out, **changes):
        """Compare `out` with the reference for a layer with these properties."""
        context = self.layer_context(**changes)
        rows = zip(self.runs, self.qkv, out.split([n for _, n in self.runs]), strict=True)
        for (first, n), qkv, actual in rows:
            expected = reference_attention(
                *qkv.split([H, K, K], 1),
                scale=context.scale,
                sliding_window=context.sliding_window,
                soft_cap=context.soft_cap,
                sinks_H=context.sinks,
            )
            assert torch.allclose(actual.double(), expected[first : first + n], atol=TOLERANCE)

    def run(self, backend=OnCpu, **changes):
        """Run and check one layer with these properties."""
        layer = self.layer(backend, **changes)
        self.check(self.attend(layer, self.builder(backend).build(self.batch())), **changes)
