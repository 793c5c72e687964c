"""One step of random requests whose contexts are in the cache, for tests of a single layer.

`AttentionRows` is for the contract suite. This class is for tests that inspect how a backend calls
its kernels. torch is imported within functions.

Dimensions: T tokens of a step, R requests, M block-table width, B block size, H query heads,
K key-value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_devkit.attention.reference import reference_attention

if TYPE_CHECKING:
    import torch

TOLERANCE = 0.02


class RandomStep(ABC):
    """Random requests on the CPU, and a cache whose unused slots are NaN.

    runs: (context, queries) of each request. table_RM: the block tables; block ids are consecutive,
    and block 0 belongs to no request.
    """

    num_heads = 4

    def __init__(
        self,
        backend: type[AttentionBackend],
        runs: Sequence[tuple[int, int]],
        spec: FullAttentionSpec,
        dtype: torch.dtype,
    ) -> None:
        """dtype: the dtype of queries, keys and values."""
        import torch

        self.backend, self.runs, self.spec, self.dtype = backend, runs, spec, dtype
        generator = torch.Generator().manual_seed(7)
        shape = (self.num_heads + 2 * spec.num_kv_heads, spec.head_size)
        self.qkv = [torch.randn(sum(run), *shape, generator=generator).to(dtype) for run in runs]
        counts = [ceil(sum(run) / spec.block_size) for run in runs]
        self.table_RM = torch.zeros(len(runs), max(counts) + 1, dtype=torch.int32)
        cache_shape = backend.kv_cache_shape(1 + sum(counts), spec)
        self.cache = torch.full(cache_shape, torch.nan, dtype=dtype)
        for row, (context, _) in enumerate(runs):
            start, count = 1 + sum(counts[:row]), counts[row]
            self.table_RM[row, :count] = torch.arange(start, start + count)
            slots = self.slots(row, range(context))
            for index, x in enumerate(self.split(self.qkv[row][:context])[1:]):
                self.write(index, slots // spec.block_size, slots % spec.block_size, x)
        self._reassign_blocks()

    @abstractmethod
    def write(
        self, index: int, blocks_T: torch.Tensor, offsets_T: torch.Tensor, x_TKD: torch.Tensor
    ) -> None:
        """Write keys (index 0) or values (index 1) to the cache."""

    def _reassign_blocks(self) -> None:
        """Reassign the blocks before the window of each request to another request."""
        window, size = self.spec.sliding_window, self.spec.block_size
        if window:
            for row, (context, _) in enumerate(self.runs):
                self.table_RM[row, : max(0, context + 1 - window) // size] = 0

    def slots(self, row: int, positions: Sequence[int]) -> torch.Tensor:
        """Return the slots of some positions of a request."""
        import torch

        size = self.spec.block_size
        at_T = torch.tensor(list(positions), dtype=torch.int64)
        return self.table_RM[row, at_T // size].long() * size + at_T % size

    def split(self, qkv: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return q, k and v of some tokens, with the strides of a fused projection."""
        num_kv_heads = self.spec.num_kv_heads
        q, k, v = qkv.split([self.num_heads, num_kv_heads, num_kv_heads], 1)
        return q, k, v

    def batch(self) -> AttentionBatch:
        """Return the batch of the step."""
        import torch

        query_lens = [n for _, n in self.runs]
        seq_lens = [sum(run) for run in self.runs]
        slots = [self.slots(row, range(c, c + n)) for row, (c, n) in enumerate(self.runs)]
        return AttentionBatch(
            query_start_R1=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
            block_table_RM=self.table_RM,
            slot_mapping_T=torch.cat(slots),
            query_lens=query_lens,
            seq_lens=seq_lens,
        )

    def builder(
        self, backend: type[AttentionBackend] | None = None, **options: object
    ) -> AttentionMetadataBuilder:
        """Return a builder for the step. options: the options of the backend plugin."""
        context = AttentionGroupContext(
            spec=self.spec,
            device=self.cache.device,
            max_num_seqs=len(self.runs),
            max_num_batched_tokens=10 * self.spec.block_size,
            max_model_len=100 * self.spec.block_size,
            options=options,
        )
        return (backend or self.backend).create_builder(context)

    def layer(
        self, backend: type[AttentionBackend] | None = None, **changes: Any
    ) -> AttentionLayer:
        """Return a layer. changes: changed fields of `layer_context`."""
        return (backend or self.backend).create_layer(self.layer_context(**changes))

    def layer_context(self, **changes: Any) -> AttentionLayerContext:
        """Return the context of a layer, with changed fields."""
        context = AttentionLayerContext(
            layer_name="layers.3.attn",
            num_heads=self.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_size=self.spec.head_size,
            scale=0.2,
            dtype=self.dtype,
            device=self.cache.device,
            sliding_window=self.spec.sliding_window,
        )
        return replace(context, **changes)

    def attend(
        self, layer: AttentionLayer, metadata: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a layer, and return its result. out: output tensor; None for a new tensor."""
        import torch

        parts = [x[context:] for x, (context, _) in zip(self.qkv, self.runs, strict=True)]
        q, k, v = self.split(torch.cat(parts))
        out = torch.full_like(q, torch.nan) if out is None else out
        layer.forward(q, k, v, self.cache, metadata, out)
        return out

    def check(self, out: torch.Tensor, **changes: Any) -> None:
        """Compare a result with the reference. changes: changed fields of `layer_context`."""
        import torch

        context = self.layer_context(**changes)
        rows = zip(self.runs, self.qkv, out.split([n for _, n in self.runs]), strict=True)
        for (first, n), qkv, actual in rows:
            expected = reference_attention(
                *self.split(qkv),
                scale=context.scale,
                sliding_window=context.sliding_window,
                soft_cap=context.soft_cap,
                sinks_H=context.sinks,
            )
            assert torch.allclose(actual.double(), expected[first : first + n], atol=TOLERANCE)

    def run(self, backend: type[AttentionBackend] | None = None, **changes: Any) -> None:
        """Run and check one layer. changes: changed fields of `layer_context`."""
        layer = self.layer(backend, **changes)
        self.check(self.attend(layer, self.builder(backend).build(self.batch())), **changes)
