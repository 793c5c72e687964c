"""A fake attention backend that is slow and correct.

The backend reads each request's keys and values slot by slot through the block table, and computes
dense attention in float64. A test may override one of its small methods to create a faulty backend.
This module does not import torch.

Dimensions: T tokens of the step, H query heads, K key-value heads, D head size, N blocks,
B block size, Q queries and L positions of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dovetail.errors import ContractError
from dovetail.interfaces.attention import (
    MLA,
    ROTARY,
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
    RotaryArgs,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec, LatentAttentionSpec
from dovetail_devkit.attention.batch import check_batch
from dovetail_devkit.attention.bidirectional import prompt_ranges
from dovetail_devkit.attention.reference import reference_attention

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class FakeAttentionMetadata:
    """The metadata of a step on the host.

    runs: (query_len, slots of all positions) of each request. slots_T: slot of each token's key and
    value, int64.
    """

    slots_T: torch.Tensor
    runs: Sequence[tuple[int, list[int]]]


class FakeBidirectionalBuilder(AttentionMetadataBuilder):
    """Returns metadata whose slots are the indices of the tokens in the step, without a cache."""

    def __init__(self, context: AttentionGroupContext) -> None:
        """Create the builder. The context is not used."""

    def build(self, batch: AttentionBatch) -> FakeAttentionMetadata:
        """Return the metadata of a step. Raise ContractError for a part of a prompt."""
        if list(batch.query_lens) != list(batch.seq_lens):
            raise ContractError("bidirectional attention needs whole prompts")
        runs = [(len(tokens), list(tokens)) for tokens in prompt_ranges(batch.query_lens)]
        return FakeAttentionMetadata(slots_T=batch.slot_mapping_T, runs=runs)


class FakeAttentionBuilder(AttentionMetadataBuilder):
    """A builder that checks the batch, then looks up the slots of each position one by one.

    It may synchronize with the device. Raises AssertionError if the batch violates its contract.
    """

    def __init__(self, context: AttentionGroupContext) -> None:
        self._block_size = context.spec.block_size
        self._window = context.spec.sliding_window

    def build(self, batch: AttentionBatch) -> FakeAttentionMetadata:
        """Return the metadata of a step. Does not change `batch`."""
        size = self._block_size
        check_batch(batch, size, self._window, self.reorder_threshold)
        runs = [
            (query_len, [table[p // size] * size + p % size for p in range(seq_len)])
            for query_len, seq_len, table in zip(
                batch.query_lens, batch.seq_lens, batch.block_table_RM.tolist(), strict=True
            )
        ]
        return FakeAttentionMetadata(slots_T=batch.slot_mapping_T, runs=runs)


class FakeAttentionLayer(AttentionLayer):
    """Attention of one layer, one request after the other, over a cache of shape [2, N, B, K, D].

    The shape is [1, N, B, K, D] if values are parts of keys.
    """

    def __init__(self, context: AttentionLayerContext) -> None:
        self.context = context

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FakeAttentionMetadata,
        out_THD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`."""
        if rotary_args is not None:
            q_THD, k_TKD = rotary_args.apply(q_THD, k_TKD)
        keys_SKD, values_SKD = k_TKD, v_TKD
        if not self.context.bidirectional:
            slots_2SKD = kv_cache.view(len(kv_cache), -1, *kv_cache.shape[3:])
            self.write(slots_2SKD, metadata.slots_T, k_TKD, v_TKD)
            keys_SKD, values_SKD = slots_2SKD[0], slots_2SKD[-1][..., : v_TKD.shape[-1]]
        start = 0
        for query_len, slots in metadata.runs:
            end = start + query_len
            out_QHD = self.attend(q_THD[start:end], keys_SKD[slots], values_SKD[slots])
            out_THD[start:end] = out_QHD.to(out_THD.dtype)
            start = end

    def write(
        self,
        slots_2SKD: torch.Tensor,
        slots_T: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
    ) -> None:
        """Write the keys and values of the step to their slots."""
        slots_2SKD[0, slots_T] = k_TKD
        if len(slots_2SKD) == 2:
            slots_2SKD[1, slots_T] = v_TKD

    def attend(self, q_QHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor) -> torch.Tensor:
        """Return the attention of one request, [Q, H, D]. Its queries are the last Q positions."""
        window = self.context.sliding_window
        num_visible = (
            window + len(q_QHD) - 1 if window else len(k_LKD)
        )  # earlier blocks may belong to other rows
        return reference_attention(
            q_QHD,
            k_LKD[-num_visible:],
            v_LKD[-num_visible:],
            scale=self.context.scale,
            sliding_window=window,
            soft_cap=self.context.soft_cap,
            sinks_H=self.context.sinks,
            slopes_H=self.context.alibi_slopes,
            bidirectional=self.context.bidirectional,
        )


class FakeAttentionBackend(AttentionBackend):
    """A backend with slow, correct paged attention in float64."""

    name: ClassVar[str] = "fake"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        features=frozenset(
            {"sliding_window", "soft_cap", "sinks", "alibi", "bidirectional", ROTARY, MLA}
        ),
    )

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return [2, N, B, K, D], or [1, N, B, K, D] if values are parts of keys."""
        num_vectors = 1 if isinstance(spec, LatentAttentionSpec) else 2
        return (num_vectors, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)

    @staticmethod
    def create_builder(context: AttentionGroupContext) -> AttentionMetadataBuilder:
        """Return the metadata builder of a group."""
        if context.bidirectional:
            return FakeBidirectionalBuilder(context)
        return FakeAttentionBuilder(context)

    @staticmethod
    def create_layer(context: AttentionLayerContext) -> AttentionLayer:
        """Return the attention of a layer."""
        return FakeAttentionLayer(context)
