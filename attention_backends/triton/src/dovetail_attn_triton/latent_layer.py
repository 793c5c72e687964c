"""Multi-head latent attention of one layer: kernel launches over a cache of vectors.

A step writes the vectors of its tokens in one launch. Then one or two launches attend, as in
layer.py, each followed by a launch that combines splits if there are any. A step allocates nothing
and does not wait for the device.

Shape legend: T tokens of the step, H query heads, D features of a vector, V features of a value,
N blocks, B block size.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch

from dovetail.errors import ContractError
from dovetail.interfaces.attention import AttentionLayer, AttentionLayerContext, RotaryArgs
from dovetail.interfaces.kv_cache import LatentAttentionSpec
from dovetail_attn_triton.device_facts import DeviceFacts
from dovetail_attn_triton.latent_kernels import attend_latent, write_vectors
from dovetail_attn_triton.latent_tiles import first_features, latent_shape, rest_features
from dovetail_attn_triton.layer import COMBINE_CHUNK, combine_splits, compute_type, is_wide
from dovetail_attn_triton.metadata import Pass, TritonAttentionMetadata
from dovetail_attn_triton.tiles import padded

WRITE_TOKENS, WRITE_FEATURES = 16, 64
"""Tokens and features per program of the kernel that writes the cache."""


class TritonLatentLayer(AttentionLayer):
    """Attention of one layer over a cache of shape [N, 1, B, D]."""

    def __init__(
        self, context: AttentionLayerContext, device: DeviceFacts, max_splits: int
    ) -> None:
        self._context = context
        self._shape = latent_shape(
            context.num_heads,
            (context.head_size, context.value_size),
            wide=is_wide(context.dtype),
            memory=device.memory,
        )
        self._factor = context.scale * log2(e)
        self._write_constants = {
            "HEAD_SIZE": context.head_size,
            "TOKENS": WRITE_TOKENS,
            "FEATURES": WRITE_FEATURES,
        }
        heads = (context.num_heads, self._shape.group)
        self._attend_constants = latent_sizes(heads, context.head_size, context.value_size)
        self._attend_constants["COMPUTE"] = compute_type(context.dtype)
        self._combine_constants: dict[str, Any] = {
            "NUM_HEADS": 1,
            "GROUP": context.num_heads,
            "HEAD_SIZE": context.value_size,
            "PADDED_SIZE": padded(context.value_size),
            "WINDOW": 0,
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
        """Write the vectors `k_TKD` to the cache and attend. Write the results, [T, H, V].

        q, k and out may be strided except in the last dimension; blocks may be strided. Raises
        ContractError if the sizes differ from those of the layer's KV-cache group.
        """
        spec, context = metadata.spec, self._context
        assert rotary_args is None, "keys of latent attention already have their positions"
        own = (context.head_size, context.value_size)
        value_size = spec.value_size if isinstance(spec, LatentAttentionSpec) else 0
        if own != (spec.head_size, value_size):
            raise ContractError(
                f"{context.layer_name} has (head size, value size) = {own}, but its KV-cache group "
                f"has {(spec.head_size, value_size)}; put layers with different values into "
                "different groups"
            )
        slots_T = metadata.batch.slot_mapping_T
        num_tokens = slots_T.shape[0]
        grid = (-(-num_tokens // WRITE_TOKENS), -(-context.head_size // WRITE_FEATURES))
        write_vectors[grid](
            k_TKD,
            kv_cache,
            slots_T,
            num_tokens,
            k_TKD.stride(0),
            kv_cache.stride(0),
            **self._write_constants,
            BLOCK_SIZE=spec.block_size,
        )
        for launch in metadata.passes(self._shape):
            self._attend(q_THD, kv_cache, out_THD, metadata, launch)

    def _attend(
        self,
        q_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        out_THD: torch.Tensor,
        metadata: TritonAttentionMetadata,
        launch: Pass,
    ) -> None:
        batch, tile, parts = metadata.batch, launch.tile, metadata.workspace.parts
        attend_latent[(launch.num_items, self._shape.num_kv_heads, launch.num_splits)](
            q_THD,
            kv_cache,
            out_THD,
            parts if launch.num_splits > 1 else None,
            batch.query_start_R1,
            batch.seq_lens_R,
            batch.block_table_RM,
            launch.work_W2,
            q_THD.stride(0),
            q_THD.stride(1),
            out_THD.stride(0),
            out_THD.stride(1),
            kv_cache.stride(0),
            batch.block_table_RM.stride(0),
            launch.num_splits,
            launch.least_span,
            launch.item_tokens,
            self._factor,
            ROWS=tile.rows,
            TILE=tile.positions,
            BLOCK_SIZE=metadata.spec.block_size,
            **self._attend_constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if launch.num_splits > 1:
            num_heads = self._context.num_heads
            rows = self._shape.tokens_of(tile) * num_heads
            constants = self._combine_constants | {"ROWS": rows}
            combine_splits(out_THD, metadata, launch, num_heads, constants)


def latent_sizes(heads: tuple[int, int], head_size: int, value_size: int) -> dict[str, Any]:
    """Return the size arguments of `attend_latent`.

    heads: the number of heads of the layer, and of one program.
    """
    first = first_features(head_size)
    return {
        "NUM_HEADS": heads[0],
        "GROUP": heads[1],
        "HEAD_SIZE": head_size,
        "VALUE_SIZE": value_size,
        "FIRST": first,
        "REST": rest_features(head_size),
    }
