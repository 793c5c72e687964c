"""The `flashinfer` attention backend: its capabilities, cache shape and parts.

Unsupported requirements are rejected, so that another backend is used. FlashInfer is imported when
the first part is created, so that this module can report a missing FlashInfer. This module does not
depend on the worker, the model or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import (
    KV_LAYER_SCALES,
    AttentionBackend,
    AttentionCapabilities,
    AttentionGroupContext,
    AttentionLayerContext,
    AttentionRequirements,
)
from dovetail.interfaces.kv_cache import SCALE_BYTES, FullAttentionSpec
from dovetail_attn_flashinfer.availability import probe
from dovetail_attn_flashinfer.device_checks import build_reasons, device_reasons, is_rocm
from dovetail_attn_flashinfer.device_facts import device_facts

if TYPE_CHECKING:
    from dovetail_attn_flashinfer.builder import FlashInferMetadataBuilder
    from dovetail_attn_flashinfer.layer import FlashInferAttentionLayer

INSTEAD = "attention_backend='torch'"
DTYPES = frozenset({"bfloat16", "float16"})
FP8_DTYPES = frozenset({"fp8_e4m3", "fp8_e5m2"})


class FlashInferAttentionBackend(AttentionBackend):
    """Paged attention with FlashInfer: prefill, chunked prefill and decodes in any mixture.

    The cache has the dtype of the model, or is fp8 with two scales for each layer. Its shape is
    that of the `triton` backend.
    """

    name: ClassVar[str] = "flashinfer"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=DTYPES,
        device_types=frozenset({"cuda"}),
        kv_cache_dtypes=DTYPES | FP8_DTYPES,
        head_sizes=frozenset({64, 128, 256}),
        block_size_multiple=16,
        features=frozenset(
            {"sliding_window", "soft_cap", "sinks", "padded_pages", "graphs", KV_LAYER_SCALES}
        ),
    )

    @classmethod
    def refusals(cls, requirements: AttentionRequirements) -> Sequence[str]:
        """Return why FlashInfer or the device cannot be used, or ()."""
        reasons = [*probe().reasons, *_cache_refusals(requirements)]
        if requirements.num_heads % requirements.num_kv_heads:
            reasons.append(
                f"{requirements.num_heads} query heads are not a multiple of "
                f"{requirements.num_kv_heads} key-value heads"
            )
        if requirements.device_type == "cuda":
            rocm = is_rocm(requirements.architecture)
            reasons += build_reasons(rocm=rocm, backend=INSTEAD)
            if not rocm and (requirements.architecture or torch.cuda.is_available()):
                reasons += device_reasons(requirements.architecture, backend=INSTEAD)
        return reasons

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return [N, 2, K, B, D]: FlashInfer's layout "HND"."""
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_size)

    @staticmethod
    def create_builder(context: AttentionGroupContext) -> FlashInferMetadataBuilder:
        """Return the metadata builder of a group.

        Raises ConfigError for an unsupported cache, and for the `kernels` option if the device does
        not support its value.
        """
        from dovetail_attn_flashinfer.builder import FlashInferMetadataBuilder

        check_cache(context.spec)
        return FlashInferMetadataBuilder(context, device_facts(context.device))

    @staticmethod
    def create_layer(context: AttentionLayerContext) -> FlashInferAttentionLayer:
        """Return the attention layer.

        Raises ConfigError if num_heads is not a multiple of num_kv_heads.
        """
        from dovetail_attn_flashinfer.layer import FlashInferAttentionLayer

        check_heads(context)
        return FlashInferAttentionLayer(context)


def check_cache(spec: FullAttentionSpec) -> None:
    """Raise ConfigError unless the kernels can read a cache of `spec`."""
    if spec.dtype not in DTYPES | FP8_DTYPES or spec.scale_bytes:
        raise ConfigError(
            f"the attention backend 'flashinfer' cannot use a KV cache of {spec.dtype} with "
            f"scale_bytes={spec.scale_bytes}; it supports "
            f"{', '.join(sorted(DTYPES | FP8_DTYPES))} without per-token scales. Set "
            "kv_cache_dtype='auto'"
        )


def check_heads(context: AttentionLayerContext) -> None:
    """Raise ConfigError unless each key-value head has the same number of query heads."""
    if context.num_kv_heads < 1 or context.num_heads % context.num_kv_heads:
        raise ConfigError(
            f"{context.layer_name} has {context.num_heads} query heads and "
            f"{context.num_kv_heads} key-value heads; the number of query heads must be a "
            "multiple of the number of key-value heads. Check num_attention_heads and "
            "num_key_value_heads in config.json"
        )


def _cache_refusals(requirements: AttentionRequirements) -> list[str]:
    """Return the reasons why the kernels cannot read a cache of this dtype."""
    dtype = requirements.kv_cache_dtype
    if dtype in SCALE_BYTES and KV_LAYER_SCALES not in requirements.features:
        advice = "kv_cache_scales='layer'" if dtype in FP8_DTYPES else "kv_cache_dtype='auto'"
        return [
            f"KV caches of {dtype} have a scale for each token and head, but the kernels support "
            f"one scale per tensor; set {advice}, or choose attention_backend='triton'"
        ]
    if dtype in DTYPES and dtype != requirements.dtype:
        return [
            f"a KV cache of {dtype} is not supported for dtype {requirements.dtype}; set "
            "kv_cache_dtype='auto'"
        ]
    return []
