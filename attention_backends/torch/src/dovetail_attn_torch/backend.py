"""The `torch` attention backend: its capabilities, cache shape and parts.

It favors clarity over speed, and is the reference for other backends. It runs on the device of its
tensors. This module does not depend on the worker, the model or the scheduler.
"""

from __future__ import annotations

from typing import ClassVar

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import (
    MLA,
    AttentionBackend,
    AttentionCapabilities,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec, LatentAttentionSpec
from dovetail_attn_torch.bidirectional import BidirectionalBuilder, BidirectionalLayer
from dovetail_attn_torch.layer import TorchAttentionLayer
from dovetail_attn_torch.metadata import TORCH_DTYPES, TorchMetadataBuilder


class TorchAttentionBackend(AttentionBackend):
    """The reference: paged attention in torch, for any device, head size and block size.

    Prefill chunks and decodes may be mixed in a step. The cache has the dtype of the model.
    """

    name: ClassVar[str] = "torch"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=frozenset(TORCH_DTYPES),
        features=frozenset(
            {
                "sliding_window",
                "soft_cap",
                "sinks",
                "alibi",
                "bidirectional",
                "padded_pages",
                MLA,
            }
        ),
    )

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return [N, B, 2, K, D]: a token's key and value are adjacent. [N, B, 1, K, D] for MLA.

        One slot number addresses both: one copy writes a step's keys, another its values, and one
        gather reads a row's keys and values.
        """
        num_vectors = 1 if isinstance(spec, LatentAttentionSpec) else 2
        return (num_blocks, spec.block_size, num_vectors, spec.num_kv_heads, spec.head_size)

    @staticmethod
    def create_builder(context: AttentionGroupContext) -> AttentionMetadataBuilder:
        """Return the builder of a group. Raise ConfigError for an unsupported cache dtype."""
        if context.spec.dtype not in TORCH_DTYPES:
            raise ConfigError(
                "the attention backend 'torch' does not support a KV cache of "
                f"{context.spec.dtype}; it supports {', '.join(TORCH_DTYPES)}. "
                "Choose kv_cache_dtype='auto'"
            )
        if context.bidirectional:
            return BidirectionalBuilder(context)
        return TorchMetadataBuilder(context)

    @staticmethod
    def create_layer(context: AttentionLayerContext) -> AttentionLayer:
        """Return the attention layer.

        Raises ConfigError if num_heads is not a multiple of num_kv_heads.
        """
        if context.num_kv_heads < 1 or context.num_heads % context.num_kv_heads:
            raise ConfigError(
                f"{context.layer_name} has {context.num_heads} query heads and "
                f"{context.num_kv_heads} key-value heads; the number of query heads must be a "
                "multiple of the number of key-value heads. Check num_attention_heads and "
                "num_key_value_heads in config.json"
            )
        if context.bidirectional:
            return BidirectionalLayer(context)
        return TorchAttentionLayer(context)
