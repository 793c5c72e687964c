"""Attention of one layer: kernel launches, with all constant arguments bound in advance.

In a step, one launch writes the cache, and rotates queries and keys if requested. One or two
launches attend, each followed by a launch that combines splits if there are any. A step allocates
nothing and does not wait for the device. This module does not depend on requests or positions.

Shape legend: T tokens of the step, H query heads, K key-value heads, D head size, N blocks,
B block size.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
import triton.language as tl

from dovetail.errors import ContractError
from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionLayer,
    AttentionLayerContext,
    RotaryArgs,
)
from dovetail_attn_triton.attention_kernels import attend, combine
from dovetail_attn_triton.cache_kernel import write_cache
from dovetail_attn_triton.device_facts import DeviceFacts
from dovetail_attn_triton.metadata import Pass, TritonAttentionMetadata
from dovetail_attn_triton.tiles import AttentionShape, attention_shape, padded
from dovetail_ops_triton.availability import INTERPRETED

COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The dtype of a GPU's matrix products, by the dtype of the model and of its cache."""

LARGEST = {
    name: torch.finfo(dtype).max
    for name, dtype in {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.items()
}
"""The largest number of each fp8 dtype of the cache: 448 and 57,344."""

WRITE_TILE = 16
"""Tokens per program of the cache kernel."""

COMBINE_CHUNK = 16
"""Splits that `combine` processes at a time."""

COMBINE_WARPS = 4


def compute_type(dtype: torch.dtype, *, is_fp8: bool = False) -> tl.dtype:
    """Return the dtype of the kernels' matrix products: float32 in the interpreter.

    is_fp8: whether the elements of the cache are fp8.
    """
    if INTERPRETED:
        return tl.float32
    return tl.float16 if is_fp8 and dtype == torch.bfloat16 else COMPUTE[dtype]


def is_wide(dtype: torch.dtype) -> bool:
    """Return whether matrix products are float32 on a GPU.

    It is false in the interpreter, which also uses the tiles of a GPU's matrix units.
    """
    return dtype == torch.float32 and not INTERPRETED


class TritonAttentionLayer(AttentionLayer):
    """Attention of one layer over a cache of shape [N, 2, K, B, D], or packed with its scales."""

    def __init__(
        self, context: AttentionLayerContext, device: DeviceFacts, max_splits: int
    ) -> None:
        self._context = context
        self._kv_cache: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None
        self._layer_scales: torch.Tensor | None = None
        self._memory = device.memory
        self._shape = self._make_shape(is_fp8=False)
        self._factor = context.scale * log2(e)
        self._cap: float | None = None
        if context.soft_cap:
            self._factor *= 2 / context.soft_cap
            self._cap = context.soft_cap * log2(e)
        sizes = {
            "NUM_HEADS": context.num_kv_heads,
            "HEAD_SIZE": context.head_size,
            "PADDED_SIZE": padded(context.head_size),
        }
        reach = sizes | {"GROUP": self._shape.group, "WINDOW": context.sliding_window}
        self._write_constants: dict[str, Any] = sizes | {"TILE": WRITE_TILE}
        self._attend_constants: dict[str, Any] = dict(reach)
        self._combine_constants: dict[str, Any] = reach | {
            "MAX_SPLITS": padded(max(max_splits, COMBINE_CHUNK)),
            "CHUNK": COMBINE_CHUNK,
        }

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TritonAttentionMetadata,
        out_THD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`.

        rotary_args: if given, q and k are rotated first. q, k, v and out may be strided except in
        the last dimension; blocks may be strided. Raises ContractError if the layer's window, heads
        or head size differ from its KV-cache group.
        """
        if kv_cache is not self._kv_cache:
            self._bind(kv_cache, metadata)
        self._write(q_THD, k_TKD, v_TKD, metadata.batch, rotary_args, out_THD)
        if rotary_args is not None:
            # A program of the attention kernel reads its queries before it writes their results,
            # and no other program uses them: `out` holds first the queries, then the results.
            q_THD = out_THD
        for item in metadata.passes(self._shape):
            self._attend(q_THD, out_THD, metadata, item)

    def _make_shape(self, *, is_fp8: bool) -> AttentionShape:
        context = self._context
        heads = (context.num_heads, context.num_kv_heads, context.head_size)
        wide = is_wide(context.dtype)
        return attention_shape(heads, wide=wide, memory=self._memory, is_fp8=is_fp8)

    def _bind(self, kv_cache: torch.Tensor, metadata: TritonAttentionMetadata) -> None:
        """Store the layer's cache, which is never replaced, and find its scales."""
        context, spec = self._context, metadata.spec
        own = (context.sliding_window, context.num_kv_heads, context.head_size)
        group = (spec.sliding_window, spec.num_kv_heads, spec.head_size)
        if own != group:
            raise ContractError(
                f"{context.layer_name} has (window, key-value heads, head size) = {own}, but its "
                f"KV-cache group has {group}; put layers with different values into different "
                "groups"
            )
        self._scales = None
        if spec.scale_bytes:
            num_elements = 2 * spec.num_kv_heads * spec.block_size * spec.head_size
            self._scales = kv_cache[:, num_elements:].view(torch.float32)
        is_fp8 = spec.dtype in LARGEST
        self._shape = self._make_shape(is_fp8=is_fp8)
        self._attend_constants["COMPUTE"] = compute_type(context.dtype, is_fp8=is_fp8)
        self._write_constants["LARGEST"] = LARGEST.get(spec.dtype, 0.0)
        if is_fp8 and not spec.scale_bytes:
            provided = context.kv_scales
            self._layer_scales = (
                torch.ones(2, device=context.device) if provided is None else provided
            )
        self._strides = (
            kv_cache.stride(0),
            0 if self._scales is None else self._scales.stride(0),
        )
        self._write_constants["BLOCK_SIZE"] = self._attend_constants["BLOCK_SIZE"] = spec.block_size
        self._kv_cache = kv_cache

    def _write(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        batch: AttentionBatch,
        rotary_args: RotaryArgs | None,
        out_THD: torch.Tensor,
    ) -> None:
        """Write the cache. With `rotary_args` rotate first, and write the queries to `out_THD`."""
        num_tokens, num_heads = batch.slot_mapping_T.shape[0], self._context.num_kv_heads
        rotated, positions_T, cos_sin_PR, half = None, None, None, 0
        rotated_strides, cos_sin_stride = (0, 0), 0
        if rotary_args is not None:
            num_heads += self._context.num_heads
            rotated, rotated_strides = out_THD, out_THD.stride()[:2]
            positions_T, cos_sin_PR = rotary_args.positions_T, rotary_args.cos_sin_PR
            half, cos_sin_stride = cos_sin_PR.shape[1] // 2, cos_sin_PR.stride(0)
        write_cache[(-(-num_tokens // WRITE_TILE), num_heads)](
            q_THD,
            k_TKD,
            v_TKD,
            rotated,
            self._kv_cache,
            self._scales,
            self._layer_scales,
            batch.slot_mapping_T,
            positions_T,
            cos_sin_PR,
            num_tokens,
            *q_THD.stride()[:2],
            *k_TKD.stride()[:2],
            *v_TKD.stride()[:2],
            *rotated_strides,
            cos_sin_stride,
            *self._strides,
            **self._write_constants,
            HALF=half,
        )

    def _attend(
        self,
        q_THD: torch.Tensor,
        out_THD: torch.Tensor,
        metadata: TritonAttentionMetadata,
        launch: Pass,
    ) -> None:
        batch, tile, parts = metadata.batch, launch.tile, metadata.workspace.parts
        attend[(launch.num_items, self._context.num_kv_heads, launch.num_splits)](
            q_THD,
            self._kv_cache,
            self._scales,
            self._layer_scales,
            out_THD,
            parts if launch.num_splits > 1 else None,
            self._context.sinks,
            batch.query_start_R1,
            batch.seq_lens_R,
            batch.block_table_RM,
            launch.work_W2,
            q_THD.stride(0),
            q_THD.stride(1),
            out_THD.stride(0),
            out_THD.stride(1),
            *self._strides,
            batch.block_table_RM.stride(0),
            launch.num_splits,
            launch.least_span,
            launch.item_tokens,
            self._factor,
            self._cap,
            ROWS=tile.rows,
            TILE=tile.positions,
            **self._attend_constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if launch.num_splits > 1:
            num_heads, constants = self._context.num_heads, self._combine_constants
            combine_splits(out_THD, metadata, launch, num_heads, constants | {"ROWS": tile.rows})


def combine_splits(
    out_THD: torch.Tensor,
    metadata: TritonAttentionMetadata,
    launch: Pass,
    num_heads: int,
    constants: dict[str, Any],
) -> None:
    """Write the results of a launch with splits to `out_THD`.

    constants: the kernel's constants; ROWS is the number of tokens of an item times GROUP.
    """
    batch = metadata.batch
    combine[(launch.num_items, launch.item_tokens, num_heads)](
        metadata.workspace.parts,
        out_THD,
        batch.query_start_R1,
        batch.seq_lens_R,
        launch.work_W2,
        out_THD.stride(0),
        out_THD.stride(1),
        launch.num_splits,
        launch.least_span,
        launch.item_tokens,
        TILE=launch.tile.positions,
        **constants,
        num_warps=COMBINE_WARPS,
    )
