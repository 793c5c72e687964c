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
    AttentionBackend,
    AttentionCapabilities,
    AttentionGroupContext,
    AttentionLayerContext,
    AttentionRequirements,
)
from dovetail.interfaces.kv_cache import SCALE_BYTES, FullAttentionSpec
from dovetail_attn_flashinfer.availability import COMPILED_KERNELS, has_kernels, probe
from dovetail_attn_flashinfer.device_facts import device_facts

if TYPE_CHECKING:
    from dovetail_attn_flashinfer.builder import FlashInferMetadataBuilder
    from dovetail_attn_flashinfer.layer import FlashInferAttentionLayer

LEAST_CAPABILITY = 80
DTYPES = frozenset({"bfloat16", "float16"})


class FlashInferAttentionBackend(AttentionBackend):
    """Paged attention with FlashInfer: prompts, chunks and decodes in any mixture.

    The cache has the dtype of the model. Its shape is that of the `triton` backend.
    """

    name: ClassVar[str] = "flashinfer"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=DTYPES,
        device_types=frozenset({"cuda"}),
        head_sizes=frozenset({64, 128, 256}),
        block_size_multiple=16,
        features=frozenset({"sliding_window", "soft_cap", "sinks", "padded_pages", "graphs"}),
    )

    @classmethod
    def refusals(cls, requirements: AttentionRequirements) -> Sequence[str]:
        """Return why FlashInfer or the device cannot be used, or ()."""
        reasons = list(probe().reasons)
        if requirements.kv_cache_dtype in SCALE_BYTES:
            reasons.append(
                f"KV caches of {requirements.kv_cache_dtype} have a scale for each token and head, "
                "but the kernels support one scale per tensor; set kv_cache_dtype='auto', or "
                "choose attention_backend='triton'"
            )
        if requirements.num_heads % requirements.num_kv_heads:
            reasons.append(
                f"{requirements.num_heads} query heads are not a multiple of "
                f"{requirements.num_kv_heads} key-value heads"
            )
        if requirements.device_type == "cuda":
            is_rocm = _is_rocm(requirements.architecture)
            reasons += _build_refusals(is_rocm=is_rocm)
            if not is_rocm and (requirements.architecture or torch.cuda.is_available()):
                reasons += _device_refusals(requirements.architecture)
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
        """Return the attention layer; raise ConfigError if the heads do not divide evenly."""
        from dovetail_attn_flashinfer.layer import FlashInferAttentionLayer

        check_heads(context)
        return FlashInferAttentionLayer(context)


def check_cache(spec: FullAttentionSpec) -> None:
    """Raise ConfigError unless the kernels can read a cache of `spec`."""
    if spec.dtype not in DTYPES or spec.scale_bytes:
        raise ConfigError(
            f"the attention backend 'flashinfer' cannot use a KV cache of {spec.dtype} with "
            f"scale_bytes={spec.scale_bytes}; it supports {' and '.join(sorted(DTYPES))} without "
            "scales. Set kv_cache_dtype='auto'"
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


def _is_rocm(architecture: str) -> bool:
    """Return whether the assumed device, or this torch build, is AMD's."""
    return not architecture.startswith("sm_") if architecture else torch.version.hip is not None


def _build_refusals(*, is_rocm: bool) -> list[str]:
    """Return the reasons why this torch build or this machine has no usable kernels."""
    reasons = []
    if is_rocm:
        reasons.append(
            "torch is built for ROCm, which the kernels do not support; install a torch build for "
            "CUDA, or choose attention_backend='torch'"
        )
    if not has_kernels():
        package = COMPILED_KERNELS.replace("_", "-")
        reasons.append(
            "FlashInfer compiles its kernels, but no CUDA compiler was found: install the CUDA "
            f"toolkit and set CUDA_HOME, or install {package}"
        )
    return reasons


def _device_refusals(architecture: str) -> list[str]:
    """Return the reasons why a GPU is not supported.

    architecture: "" for the GPU of this process.
    """
    if architecture:
        capability = int(architecture.removeprefix("sm_"))
    else:
        capability = device_facts(torch.device("cuda", torch.cuda.current_device())).capability
    if capability >= LEAST_CAPABILITY:
        return []
    return [
        f"the GPU has compute capability {capability / 10}; the kernels need "
        f"{LEAST_CAPABILITY / 10} (Ampere) or newer. Choose attention_backend='torch'"
    ]
