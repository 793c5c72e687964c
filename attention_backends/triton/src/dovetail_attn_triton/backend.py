"""The `triton` attention backend: its capabilities, cache shape and parts.

Unsupported requirements are rejected, so that another backend is used. Triton is imported when the
first part is created, so that this module can report a missing Triton. This module does not depend
on the worker, the model or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import (
    KV_LAYER_SCALES,
    MLA,
    ROTARY,
    AttentionBackend,
    AttentionCapabilities,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionRequirements,
)
from dovetail.interfaces.kv_cache import (
    DTYPE_BYTES,
    SCALE_BYTES,
    FullAttentionSpec,
    LatentAttentionSpec,
)
from dovetail_attn_triton.device_facts import device_facts
from dovetail_attn_triton.options import TritonAttentionOptions
from dovetail_ops_triton.availability import INTERPRETED, probe

if TYPE_CHECKING:
    from dovetail_attn_triton.metadata import TritonMetadataBuilder

FP8 = "fp8_e4m3"
FP8_DTYPES = frozenset({FP8, "fp8_e5m2"})
LEAST_CAPABILITY = 80
LEAST_CAPABILITY_OF_FP8 = 89
AMD_ARCHITECTURES = frozenset({"gfx942"})
"""The AMD targets for which the kernels are compiled and their resources checked."""
DTYPES = frozenset({"float32", "bfloat16", "float16"})
HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 256})
LATENT_SIZES = frozenset({320, 576})
"""Sizes that only vectors of latent attention may have: 256 or 512 features, and 64 rotary
features."""


class TritonAttentionBackend(AttentionBackend):
    """Paged attention in Triton: prefill, chunked prefill and decodes in any mixture.

    The cache has the dtype of the model, or is fp8: e4m3 with a scale for each token and head, or
    e4m3 or e5m2 with two scales for each layer.
    Requests with few tokens and long contexts are cut into splits, so that a few requests keep the
    device busy.
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=DTYPES,
        device_types=frozenset({"cuda", "xpu"}) | (frozenset({"cpu"}) if INTERPRETED else set()),
        kv_cache_dtypes=DTYPES | FP8_DTYPES,
        head_sizes=HEAD_SIZES | LATENT_SIZES,
        block_size_multiple=16,
        features=frozenset(
            {
                "sliding_window",
                "soft_cap",
                "sinks",
                "padded_pages",
                "graphs",
                ROTARY,
                KV_LAYER_SCALES,
                MLA,
            }
        ),
    )

    @classmethod
    def refusals(cls, requirements: AttentionRequirements) -> Sequence[str]:
        """Return why Triton or the device cannot be used, or ()."""
        reasons = list(probe().reasons)
        is_fp8 = requirements.kv_cache_dtype in FP8_DTYPES
        if requirements.kv_cache_dtype != requirements.dtype and not is_fp8:
            reasons.append(
                f"kv_cache_dtype {requirements.kv_cache_dtype!r} is not supported for dtype "
                f"{requirements.dtype}; the kernels support {requirements.dtype}, "
                f"{' or '.join(sorted(FP8_DTYPES))}"
            )
        is_latent = MLA in requirements.features
        if is_latent and is_fp8:
            reasons.append(
                f"latent attention with a KV cache of {requirements.kv_cache_dtype} is not "
                f"supported; use kv_cache_dtype {requirements.dtype!r}"
            )
        if not is_latent and requirements.head_size > max(HEAD_SIZES):
            reasons.append(
                f"head size {requirements.head_size} is supported for latent attention only; the "
                f"largest head size is {max(HEAD_SIZES)}"
            )
        if requirements.device_type == "xpu" and is_fp8:
            reasons.append(
                f"a KV cache of {requirements.kv_cache_dtype} is supported on CUDA devices only"
            )
        if requirements.architecture or (
            requirements.device_type == "cuda" and torch.cuda.is_available()
        ):
            reasons += _device_refusals(requirements)
        return reasons

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return [N, 2, K, B, D]; with scales, [N, elements of a block] with the scales last.

        Return [N, K, B, D] for latent attention, which caches no values.
        """
        if isinstance(spec, LatentAttentionSpec):
            return (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size)
        if spec.scale_bytes:
            return (num_blocks, spec.page_size_bytes // DTYPE_BYTES[spec.dtype])
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_size)

    @staticmethod
    def create_builder(context: AttentionGroupContext) -> TritonMetadataBuilder:
        """Return the metadata builder of a group; raise ConfigError for an unsupported cache."""
        from dovetail_attn_triton.metadata import TritonMetadataBuilder

        spec = context.spec
        if spec.dtype not in TritonAttentionBackend.capabilities.kv_cache_dtypes:
            raise ConfigError(
                f"the attention backend 'triton' does not support a KV cache of {spec.dtype}; it "
                f"supports {', '.join(sorted(DTYPES | FP8_DTYPES))}. Choose kv_cache_dtype='auto'"
            )
        if spec.scale_bytes not in ((0, SCALE_BYTES[FP8]) if spec.dtype == FP8 else (0,)):
            raise ConfigError(
                f"the attention backend 'triton' cannot use a KV cache of {spec.dtype} with "
                f"scale_bytes={spec.scale_bytes}; set 4 or 0 for {FP8}, 0 for other dtypes"
            )
        return TritonMetadataBuilder(context, device_facts(context.device).num_processors)

    @staticmethod
    def create_layer(context: AttentionLayerContext) -> AttentionLayer:
        """Return the attention layer.

        Raises ConfigError if num_heads is not a multiple of num_kv_heads, and for unsupported
        latent attention.
        """
        from dovetail_attn_triton.latent_layer import TritonLatentLayer
        from dovetail_attn_triton.layer import TritonAttentionLayer

        if context.num_kv_heads < 1 or context.num_heads % context.num_kv_heads:
            raise ConfigError(
                f"{context.layer_name} has {context.num_heads} query heads and "
                f"{context.num_kv_heads} key-value heads; the number of query heads must be a "
                "multiple of the number of key-value heads. Check num_attention_heads and "
                "num_key_value_heads in config.json"
            )
        options = TritonAttentionOptions(**context.options)
        facts = device_facts(context.device)
        if not context.value_size:
            return TritonAttentionLayer(context, facts, options.max_splits)
        is_plain = not context.sliding_window and not context.soft_cap and context.sinks is None
        if context.num_kv_heads != 1 or not is_plain:
            raise ConfigError(
                f"{context.layer_name} has latent attention with {context.num_kv_heads} key-value "
                "heads, a sliding window, a soft cap or sinks; the attention backend 'triton' "
                "supports latent attention with one key-value head and no such option. Choose "
                "attention_backend='torch'"
            )
        return TritonLatentLayer(context, facts, options.max_splits)


def _device_refusals(requirements: AttentionRequirements) -> list[str]:
    """Return the reasons why this process's GPU does not meet the requirements."""
    architecture, capability = requirements.architecture, 0
    if architecture.startswith("sm_"):
        capability = int(architecture.removeprefix("sm_"))
    elif not architecture:
        facts = device_facts(torch.device("cuda", torch.cuda.current_device()))
        architecture, capability = facts.architecture, facts.capability
    if not capability:
        return _amd_refusals(architecture, requirements.kv_cache_dtype)
    shown = f"the GPU has compute capability {capability / 10}"
    if capability < LEAST_CAPABILITY:
        return [f"{shown}; the kernels need {LEAST_CAPABILITY / 10} (Ampere) or newer"]
    dtype = requirements.kv_cache_dtype
    if dtype in FP8_DTYPES and capability < LEAST_CAPABILITY_OF_FP8:
        needed = f"{LEAST_CAPABILITY_OF_FP8 / 10} (Ada) or newer"
        return [f"{shown}; a KV cache of {dtype} needs {needed}"]
    return []


def _amd_refusals(architecture: str, kv_cache_dtype: str) -> list[str]:
    """Return the reasons why an AMD device does not meet the requirements."""
    reasons = []
    if architecture not in AMD_ARCHITECTURES:
        reasons.append(
            f"the GPU is a {architecture or 'device of unknown architecture'}; the kernels are "
            f"checked for {', '.join(sorted(AMD_ARCHITECTURES))} only"
        )
    if kv_cache_dtype in FP8_DTYPES:
        reasons.append(f"a KV cache of {kv_cache_dtype} is supported on NVIDIA devices only")
    return reasons
