"""Test requests of the attention suite, with their KV cache and the expected results.

Cache blocks that belong to no request contain NaN, so that wrong reads are detected. For positions
before the window, the block table of a request points to such blocks, because an engine may have
reused the original ones. This module uses only the contract of a backend. torch is imported within
functions.

Dimensions: T tokens of a step, R requests, M block-table width, B block size, H query heads,
K key-value heads, G query heads for each of them, D head size, Q queries and L positions of one
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
    AttentionMetadataBuilder,
    RotaryArgs,
)
from dovetail.interfaces.kv_cache import DTYPE_BYTES
from dovetail_devkit.attention.case import LIMITS, AttentionCase
from dovetail_devkit.attention.reference import reference_attention
from dovetail_devkit.expectation import expect
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.ops.rotary import far_apart, rotary_table, turned

if TYPE_CHECKING:
    import torch

UNWRITTEN = 0xFF
"""The value of each byte of a new cache."""
TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""The torch names of element types that have a different name in torch."""

Run = tuple[int, int, int]
"""A run of a row: (row, first position, number of tokens)."""


class AttentionRows:
    """The requests of a case: random q, k, v, expected results, blocks, and the cache.

    builder: builds the metadata; layer: computes attention. blocks: the blocks of each request.
    """

    def __init__(
        self, backend: type[AttentionBackend], case: AttentionCase, device: torch.device
    ) -> None:
        import torch

        self.case = case
        self.device = device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(case.seed)
        lengths = [context + query + 1 for context, query in case.runs] + [case.block_size + 3]
        self._make_blocks([ceil(length / case.block_size) for length in lengths], generator)
        self.sinks: torch.Tensor | None = None
        if case.sinks:  # similar in size to the scores; some are larger than all scores
            self.sinks = 2 * torch.randn(case.num_heads, generator=generator)
        self.slopes: torch.Tensor | None = None
        if case.alibi:  # different for every head, and as steep as those of trained models
            self.slopes = torch.rand(case.num_heads, generator=generator)
        num_heads = case.num_heads + (1 if case.value_size else 2) * case.num_kv_heads
        self.qkv = [
            torch.randn((n, num_heads, case.head_size), generator=generator).to(self.dtype)
            for n in lengths
        ]
        self.want = [
            reference_attention(
                *self._rotated_parts(qkv),
                scale=case.scale,
                sliding_window=case.sliding_window,
                soft_cap=case.soft_cap,
                sinks_H=self.sinks,
                slopes_H=self.slopes,
            )
            for qkv in self.qkv
        ]
        self._make_parts(backend, lengths)

    def _make_blocks(self, counts: Sequence[int], generator: torch.Generator) -> None:
        """Assign blocks in random order. Block 0 and two other blocks belong to no request."""
        import torch

        self.num_blocks = sum(counts) + 3
        free = (torch.randperm(self.num_blocks - 1, generator=generator) + 1).tolist()
        self.blocks = [[free.pop() for _ in range(count)] for count in counts]
        self.foreign = free.pop()

    def _make_parts(self, backend: type[AttentionBackend], lengths: Sequence[int]) -> None:
        import torch

        case = self.case
        shape = backend.kv_cache_shape(self.num_blocks, case.spec)
        got_bytes = prod(shape) * DTYPE_BYTES[case.spec.dtype]
        want_bytes = self.num_blocks * case.spec.page_size_bytes
        expect(
            got_bytes == want_bytes,
            f"kv_cache_shape returns {shape}, which takes {got_bytes} bytes with "
            f"{case.spec.dtype}; expected {want_bytes} bytes. The case is {case}.",
        )
        self._make_cache(shape)
        self._make_builder = partial(
            backend.create_builder,
            AttentionGroupContext(
                spec=case.spec,
                device=self.device,
                max_num_seqs=len(lengths),
                max_num_batched_tokens=sum(lengths),
                max_model_len=max(lengths),
            ),
        )
        self.builder = self._make_builder()
        self.layer = backend.create_layer(
            AttentionLayerContext(
                layer_name="layers.0.attn",
                num_heads=case.num_heads,
                num_kv_heads=case.num_kv_heads,
                head_size=case.head_size,
                scale=case.scale,
                dtype=self.dtype,
                device=self.device,
                sliding_window=case.sliding_window,
                soft_cap=case.soft_cap,
                sinks=None if self.sinks is None else self.sinks.to(self.device),
                alibi_slopes=None if self.slopes is None else self.slopes.to(self.device),
                kv_scales=(
                    torch.tensor(case.layer_scales, device=self.device)
                    if case.has_layer_scales
                    else None
                ),
                value_size=case.value_size,
            )
        )

    def _make_cache(self, shape: tuple[int, ...]) -> None:
        """Create the cache with the case's padding after each block, and set all its bits.

        Such values are NaN in every type that has NaN, also in scales.
        """
        import torch

        page = self.case.spec.page_size_bytes + self.case.padding
        self.memory = torch.full(
            (self.num_blocks, page), UNWRITTEN, dtype=torch.uint8, device=self.device
        )
        dtype = getattr(torch, TORCH_NAMES.get(self.case.spec.dtype, self.case.spec.dtype))
        if not self.case.padding:
            self.cache = self.memory.view(-1).view(dtype).view(shape)
            return
        own = self.memory[:, : self.case.spec.page_size_bytes]
        expect(
            shape[0] == self.num_blocks,
            f"padded_pages is claimed, but blocks are not the first dimension of the cache {shape}",
        )
        self.cache = own.view(dtype).unflatten(1, shape[1:])

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of q, k and v with the strides of a fused projection."""
        num_heads, num_kv_heads = self.case.num_heads, self.case.num_kv_heads
        if self.case.value_size:
            q, k = qkv.split([num_heads, num_kv_heads], dim=1)
            return q, k, k[..., : self.case.value_size]
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return q, k, v

    def _rotated_parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of a request's positions, as attention reads them.

        The tensors are float64 if the case rotates heads.
        """
        import torch

        q, k, v = self._split(qkv)
        if self.case.rotary_dim:
            table_PR = rotary_table(self.case.rotary_dim, torch.device("cpu")).double()
            cos_sin_TR = table_PR[far_apart(0, len(qkv))]
            q, k = turned(q.double(), cos_sin_TR), turned(k.double(), cos_sin_TR)
        if self.case.has_layer_scales:
            k, v = (x.clamp(-limit, limit) for x, limit in zip((k, v), LIMITS, strict=True))
        return q, k, v

    def _rotary_args(self, runs: Sequence[Run]) -> tuple[RotaryArgs, ...]:
        """Return the optional arguments of the layer for a step with these requests."""
        import torch

        if not self.case.rotary_dim:
            return ()
        positions = [position for _, first, n in runs for position in far_apart(first, n)]
        table_PR = rotary_table(self.case.rotary_dim, self.device)
        positions_T = torch.tensor(positions, device=self.device)
        return (RotaryArgs(ops=FakeOps(), positions_T=positions_T, cos_sin_PR=table_PR),)

    def step(self, name: str, runs: Sequence[Run], *, batch: AttentionBatch | None = None) -> None:
        """Run and check one step. batch: used instead of a new batch, if given."""
        what = f"The step is {name!r}. The case is {self.case}."
        runs = self.in_order(runs)
        batch = batch or self.batch(runs)
        metadata = self.builder.build(batch)
        self.expect_right(what, runs, self.attend(runs, batch, metadata, what))

    def in_order(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Return the requests in the order that the builder requires."""
        threshold = self.builder.reorder_threshold
        return sorted(runs, key=lambda run: run[2] > threshold) if threshold else runs

    def attend(
        self, runs: Sequence[Run], batch: AttentionBatch, metadata: Any, what: str
    ) -> list[torch.Tensor]:
        """Run the layer and return the result of each request.

        Check that read-only data is unchanged.
        """
        import torch

        tensors = [
            batch.query_start_R1,
            batch.seq_lens_R,
            batch.block_table_RM,
            batch.slot_mapping_T,
            torch.cat([self.qkv[row][first : first + n] for row, first, n in runs]).to(self.device),
        ]
        copies = [tensor.clone() for tensor in tensors]
        q, k, v = self._split(tensors[-1])
        shape = (*q.shape[:-1], v.shape[-1])
        out_THD = torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)
        before = self.memory.clone()
        self.layer.forward(q, k, v, self.cache, metadata, out_THD, *self._rotary_args(runs))
        for label, tensor, copy in zip(
            ("query_start", "seq_lens", "block_table", "slot_mapping", "q, k or v"),
            tensors,
            copies,
            strict=True,
        ):
            expect(
                torch.equal(tensor, copy), f"the layer changed {label}, which is read-only. {what}"
            )
        # A change of zeros is not an error: a backend may clear slots that no token has used yet.
        wrong = (self.memory != before) & (before != UNWRITTEN) & (before != 0)
        expect(not wrong.any(), f"the layer changed the cache of earlier tokens. {what}")
        return list(out_THD.to("cpu").split([n for _, _, n in runs]))

    def expect_right(self, what: str, runs: Sequence[Run], actual: Sequence[torch.Tensor]) -> None:
        """Compare the result of each request with the reference."""
        for (row, first, n), got_QHD in zip(runs, actual, strict=True):
            location = f"Row {row} computes the positions {first} to {first + n - 1}. {what}"
            self._compare(location, got_QHD, self.want[row][first : first + n])

    def new_builder(self) -> AttentionMetadataBuilder:
        """Return a new attention metadata builder for the same KV cache group."""
        return self._make_builder()

    def batch(self, runs: Sequence[Run]) -> AttentionBatch:
        """Return the batch of a step with these requests."""
        import torch

        size = self.case.block_size
        width = max(len(blocks) for blocks in self.blocks) + 2
        table = [self._table(row, first, width) for row, first, _ in runs]
        slots = [
            self.blocks[row][position // size] * size + position % size
            for row, first, n in runs
            for position in range(first, first + n)
        ]
        query_lens = tuple(n for _, _, n in runs)
        seq_lens = tuple(first + n for _, first, n in runs)
        starts = [sum(query_lens[:i]) for i in range(len(runs) + 1)]
        return AttentionBatch(
            query_start_R1=torch.tensor(starts, dtype=torch.int32, device=self.device),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            block_table_RM=torch.tensor(table, dtype=torch.int32, device=self.device),
            slot_mapping_T=torch.tensor(slots, dtype=torch.int64, device=self.device),
            query_lens=query_lens,
            seq_lens=seq_lens,
        )

    def _table(self, row: int, first: int, width: int) -> list[int]:
        """Return the block table of a request for a step from `first`.

        The entries before the window are wrong on purpose, because the layer must not use them.
        """
        blocks, window = self.blocks[row], self.case.sliding_window
        num_left = max(0, first - window + 1) // self.case.block_size if window else 0
        return [self.foreign] * num_left + blocks[num_left:] + [0] * (width - len(blocks))

    def _compare(self, location: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = self.case.tolerance
        error = (actual.double() - expected).abs() / expected.abs().clamp(min=1.0)
        # A NaN is always an error, but comparisons with it are false.
        error = error.nan_to_num(nan=float("inf"))
        worst = int(error.argmax())
        token, rest = divmod(worst, expected[0].numel())
        head, element = divmod(rest, expected.shape[2])
        expect(
            float(error.flatten()[worst]) <= tolerance,
            f"attention is wrong: token {token}, head {head}, element {element} is "
            f"{float(actual.flatten()[worst])}; expected {float(expected.flatten()[worst])}, with "
            f"a tolerance of {tolerance}. {location}",
        )
