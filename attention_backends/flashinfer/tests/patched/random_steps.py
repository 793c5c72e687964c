"""Steps of random requests, with their cache and their exact results.

Dimensions: B block size, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from cpu_backends import LEAST_MEMORY, OnCpu
from reference_attention import calls

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_devkit.attention.reference import reference_attention

CPU = torch.device("cpu")
B, H, K, D = 16, 4, 2, 64
SPEC = FullAttentionSpec(block_size=B, num_kv_heads=K, head_size=D, dtype="bfloat16")
RUNS = ((2 * B, 1), (B, 1), (3, B + 2), (0, 5))  # (context, queries): decodes first


class Step:
    """One step of random requests whose contexts are in the cache."""

    def __init__(self, runs=RUNS, spec=SPEC):
        generator = torch.Generator().manual_seed(7)
        self.runs, self.spec = runs, spec
        self.qkv = [
            torch.randn((sum(run), H + 2 * K, spec.head_size), generator=generator).bfloat16()
            for run in runs
        ]
        counts = [-(-sum(run) // B) for run in runs]
        starts = [1 + sum(counts[:row]) for row in range(len(runs))]
        width = max(counts)
        self.table_RM = torch.zeros(len(runs), width, dtype=torch.int32)
        shape = OnCpu.kv_cache_shape(1 + sum(counts), spec)
        self.cache = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.table_RM[row, :count] = torch.arange(start, start + count)
        for row, (context, _) in enumerate(runs):
            keys, values = self.qkv[row][:context].split([H, K, K], 1)[1:]
            slots = self.slots(row, range(context))
            for index, x in enumerate((keys, values)):
                self.cache[slots // B, index, :, slots % B] = x

    def slots(self, row, positions):
        at = torch.tensor(list(positions), dtype=torch.int64)
        return self.table_RM[row, at // B].long() * B + at % B

    def batch(self):
        query_lens = [n for _, n in self.runs]
        ends = torch.tensor([0, *query_lens]).cumsum(0).int()
        slots = [self.slots(row, range(c, c + n)) for row, (c, n) in enumerate(self.runs)]
        return AttentionBatch(
            query_start_R1=ends,
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
            max_num_batched_tokens=100,
            max_model_len=1000,
            options=LEAST_MEMORY | options,
        )
        return backend.create_builder(context)

    def attend(self, layer, metadata, out=None):
        parts = [x[context:] for x, (context, _) in zip(self.qkv, self.runs, strict=True)]
        q, k, v = torch.cat(parts).split([H, K, K], 1)
        out = torch.full_like(q, torch.nan) if out is None else out
        layer.forward(q, k, v, self.cache, metadata, out)
        return out

    def check(self, out, layer_context):
        for (context, n), qkv, actual in zip(
            self.runs, self.qkv, out.split([n for _, n in self.runs]), strict=True
        ):
            expected = reference_attention(
                *qkv.split([H, K, K], 1),
                scale=layer_context.scale,
                sliding_window=layer_context.sliding_window,
                soft_cap=layer_context.soft_cap,
                sinks_H=layer_context.sinks,
            )
            assert torch.allclose(actual.double(), expected[context : context + n], atol=0.02)


def layer_context(**changes):
    context = AttentionLayerContext(
        layer_name="layers.3.attn",
        num_heads=H,
        num_kv_heads=K,
        head_size=D,
        scale=0.2,
        dtype=torch.bfloat16,
        device=CPU,
    )
    return replace(context, **changes)


def attended(step, backend=OnCpu, **changes):
    """Run a step with one layer, check it, and return the names of the calls."""
    context = layer_context(**changes)
    layer = backend.create_layer(context)
    step.check(step.attend(layer, step.builder(backend).build(step.batch())), context)
    return [name for name, _ in calls]
