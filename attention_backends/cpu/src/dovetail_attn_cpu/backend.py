"""The `cpu` attention backend: its capabilities, cache shape and parts.

In each step, one native call per layer writes the keys and values and computes attention
(dovetail_attention.h). Unsupported requirements are rejected, so that another backend is used. This
module does not depend on the worker, the model or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    AttentionRequirements,
)
from dovetail.interfaces.kv_cache import DTYPE_BYTES, FullAttentionSpec, LatentAttentionSpec
from dovetail_attn_cpu.availability import missing_reasons
from dovetail_attn_cpu.bidirectional import BidirectionalBuilder, BidirectionalLayer
from dovetail_attn_cpu.layer import CPUAttentionLayer
from dovetail_attn_cpu.metadata import CACHE_KINDS, CPUMetadataBuilder
from dovetail_cpu_kernels.attention import BLOCK_MULTIPLE, attention_block_bytes


class CPUAttentionBackend(AttentionBackend):
    """Native paged attention for CPUs: bf16 queries, a cache of bf16 or int8.

    Prefill chunks and decodes may be mixed in a step. A token's output is bitwise equal for every
    batch, block size, number of threads and chunking of its prompt.
    """

    name: ClassVar[str] = "cpu"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=frozenset({"bfloat16"}),
        device_types=frozenset({"cpu"}),
        kv_cache_dtypes=frozenset(CACHE_KINDS),
        head_sizes=frozenset({*range(16, 257, 16), *range(320, 577, 64)}),
        block_size_multiple=BLOCK_MULTIPLE,
        features=frozenset(
            {
                "sliding_window",
                "soft_cap",
                "sinks",
                "padded_pages",
                "batch_invariant",
                "supports_advance",
                "bidirectional",
                MLA,
            }
        ),
    )

    @classmethod
    def refusals(cls, requirements: AttentionRequirements) -> Sequence[str]:
        """Return why the native library cannot be used, or ()."""
        return missing_reasons()

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return [N, elements of a block]. A block contains packed panels, and scales if int8."""
        return (num_blocks, spec.page_size_bytes // DTYPE_BYTES[spec.dtype])

    @staticmethod
    def create_builder(context: AttentionGroupContext) -> AttentionMetadataBuilder:
        """Return the metadata builder of a group. Raise ConfigError for an unsupported cache."""
        if context.bidirectional:
            return BidirectionalBuilder(context)
        spec = context.spec
        if spec.dtype not in CACHE_KINDS:
            raise ConfigError(
                f"the attention backend 'cpu' does not support a KV cache of {spec.dtype}; it "
                f"supports only {', '.join(CACHE_KINDS)}. Choose kv_cache_dtype='auto'"
            )
        block_bytes = attention_block_bytes(
            spec.num_kv_heads,
            spec.head_size,
            spec.block_size,
            CACHE_KINDS[spec.dtype],
            spec.value_size if isinstance(spec, LatentAttentionSpec) else 0,
        )
        if block_bytes != spec.page_size_bytes:
            raise ConfigError(
                f"the KV-cache spec has blocks of {spec.page_size_bytes} bytes, but blocks of "
                f"{spec.dtype} need {block_bytes} bytes. Set scale_bytes=4 in the int8 spec"
            )
        return CPUMetadataBuilder(context)

    @staticmethod
    def create_layer(context: AttentionLayerContext) -> AttentionLayer:
        """Return the attention layer. Raise ConfigError if the kernels do not support it."""
        if context.num_kv_heads < 1 or context.num_heads % context.num_kv_heads:
            raise ConfigError(
                f"{context.layer_name} has {context.num_heads} query heads and "
                f"{context.num_kv_heads} key-value heads; the number of query heads must be a "
                "multiple of the number of key-value heads. Check num_attention_heads and "
                "num_key_value_heads in config.json"
            )
        if context.scale <= 0:
            raise ConfigError(
                f"{context.layer_name} scales its scores by {context.scale}; the attention backend "
                "'cpu' requires a positive scale. Choose attention_backend='torch'"
            )
        if context.bidirectional:
            return BidirectionalLayer(context)
        return CPUAttentionLayer(context)
