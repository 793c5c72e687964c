"""The `flash_attn` attention backend: its capabilities, cache shape and parts.

The kernels belong to one of several providers. Unsupported requirements are rejected with a reason
for each provider, so that another backend is used. A provider is imported only if it meets all
requirements. This module does not depend on the worker, the model or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

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
from dovetail_attn_flash_attn.device_facts import DeviceFacts
from dovetail_attn_flash_attn.layer import FlashAttentionLayer
from dovetail_attn_flash_attn.metadata import FlashAttentionBuilder
from dovetail_attn_flash_attn.options import FlashAttentionOptions
from dovetail_attn_flash_attn.providers import PROVIDERS
from dovetail_attn_flash_attn.providers.provider import (
    FP8,
    FP8_MODEL_DTYPE,
    HALF_DTYPES,
    HEAD_SIZES,
    SINKS,
    SLIDING_WINDOW,
    SOFT_CAP,
    Needs,
    Provider,
)
from dovetail_attn_flash_attn.selection import rejections, select_provider

BLOCK_SIZE_MULTIPLE = 16
COMMON_FEATURES = frozenset({"padded_pages", "graphs", KV_LAYER_SCALES})
"""The features that do not depend on the provider."""

PROVIDER_FEATURES = frozenset({SLIDING_WINDOW, SOFT_CAP, SINKS})
CACHE_DTYPES = HALF_DTYPES | {FP8}


class FlashAttentionBackend(AttentionBackend):
    """Paged FlashAttention 2 or 3: prefill, chunked prefill and decodes in any mixture.

    The capabilities are those of all providers together. `refusals` requires one provider that
    meets all requirements of the model. Each layer then uses the first provider that meets its own
    requirements. The cache has the dtype of the model, or is fp8 (e4m3) with two scales for each
    layer. It has the same shape for all providers.

    providers: the available providers, in the order of selection. devices: properties of the GPUs.
    """

    name: ClassVar[str] = "flash_attn"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=HALF_DTYPES,
        device_types=frozenset({DeviceFacts.device_type}),
        kv_cache_dtypes=CACHE_DTYPES,
        head_sizes=HEAD_SIZES,
        block_size_multiple=BLOCK_SIZE_MULTIPLE,
        features=COMMON_FEATURES | PROVIDER_FEATURES,
    )
    providers: ClassVar[Sequence[Provider]] = PROVIDERS
    devices: ClassVar[DeviceFacts] = DeviceFacts()

    @classmethod
    def refusals(cls, requirements: AttentionRequirements) -> Sequence[str]:
        """Return one reason for each provider, or () if a provider meets all requirements.

        Reasons that concern all providers are returned alone. For a device of a different type, the
        result is (): the capabilities reject it.
        """
        if requirements.device_type not in cls.capabilities.device_types:
            return ()
        reasons = _shared_rejections(requirements)
        if cls.devices.is_rocm(requirements.architecture):
            reasons.append(
                "torch is built for ROCm, which the kernels do not support; install a torch build "
                "for CUDA, or choose attention_backend='torch'"
            )
        if reasons:
            return reasons
        capability = cls.devices.required_capability(requirements)
        stored = cls.capabilities.stored_head_size(requirements.head_size)
        needs = Needs(
            dtype=requirements.dtype,
            kv_cache_dtype=requirements.kv_cache_dtype,
            head_size=stored or requirements.head_size,
            capability=capability,
            driver=0 if requirements.architecture else cls.devices.driver(),
            num_heads=requirements.num_heads,
            block_size=requirements.block_size,
            features=requirements.features & PROVIDER_FEATURES,
        )
        # The kernels may need the driver, which the machine of an assumed device does not have.
        can_load = capability > 0 and not requirements.architecture
        return rejections(cls.providers, needs, load=can_load)

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return [N, 2, B, K, D]. Keys and values are views [N, B, K, D] with strided blocks."""
        return (num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size)

    @classmethod
    def create_builder(cls, context: AttentionGroupContext) -> FlashAttentionBuilder:
        """Return the metadata builder of a group.

        Raises ConfigError if the cache is not supported, or no provider supports the group.
        """
        spec = context.spec
        check_cache(spec)
        options = FlashAttentionOptions.model_validate(dict(context.options))
        needs = Needs(
            dtype=FP8_MODEL_DTYPE if spec.dtype == FP8 else spec.dtype,
            kv_cache_dtype=spec.dtype,
            head_size=spec.head_size,
            capability=cls.devices.capability(context.device),
            driver=cls.devices.driver(),
            block_size=spec.block_size,
            features=frozenset({SLIDING_WINDOW} if spec.sliding_window else ()),
        )
        select_provider(cls.providers, needs, options.provider, f"a group with {spec}")
        return FlashAttentionBuilder(context, options)

    @classmethod
    def create_layer(cls, context: AttentionLayerContext) -> FlashAttentionLayer:
        """Return the attention layer.

        Raises ConfigError if num_heads is not a multiple of num_kv_heads, or if no provider
        supports the layer.
        """
        check_heads(context)
        capability = cls.devices.capability(context.device)
        select = partial(cls._select, context, capability)
        # The cache is not known yet. Errors that do not depend on it are reported now.
        select(None)
        return FlashAttentionLayer(context, capability, select)

    @classmethod
    def _select(
        cls, context: AttentionLayerContext, capability: int, spec: FullAttentionSpec | None
    ) -> Provider:
        """Return the provider of a layer. spec: the spec of its cache, or None if it is unknown."""
        dtype = str(context.dtype).removeprefix("torch.")
        used = {
            SLIDING_WINDOW: context.sliding_window > 0,
            SOFT_CAP: context.soft_cap > 0,
            SINKS: context.sinks is not None,
        }
        needs = Needs(
            dtype=dtype,
            kv_cache_dtype=dtype if spec is None else spec.dtype,
            head_size=context.head_size,
            capability=capability,
            driver=cls.devices.driver(),
            num_heads=context.num_heads,
            block_size=0 if spec is None else spec.block_size,
            features=frozenset(feature for feature, is_used in used.items() if is_used),
        )
        options = FlashAttentionOptions.model_validate(dict(context.options))
        return select_provider(cls.providers, needs, options.provider, context.layer_name)


def check_cache(spec: FullAttentionSpec) -> None:
    """Raise ConfigError unless the kernels can read a cache of `spec`."""
    if spec.dtype not in CACHE_DTYPES or spec.scale_bytes:
        raise ConfigError(
            f"the attention backend 'flash_attn' cannot use a KV cache of {spec.dtype} with "
            f"scale_bytes={spec.scale_bytes}; it supports {', '.join(sorted(CACHE_DTYPES))} "
            "without per-token scales. Set kv_cache_dtype='auto'"
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


def _shared_rejections(requirements: AttentionRequirements) -> list[str]:
    """Return the reasons that concern all providers."""
    reasons = []
    cache = requirements.kv_cache_dtype
    if cache in SCALE_BYTES and KV_LAYER_SCALES not in requirements.features:
        advice = "kv_cache_scales='layer'" if cache == FP8 else "kv_cache_dtype='auto'"
        reasons.append(
            f"KV caches of {cache} have a scale for each token and head, but the kernels support "
            f"one scale per row and head; set {advice}, or choose attention_backend='triton'"
        )
    if requirements.num_heads % requirements.num_kv_heads:
        reasons.append(
            f"{requirements.num_heads} query heads are not a multiple of "
            f"{requirements.num_kv_heads} key-value heads"
        )
    return reasons
