"""Properties of a device, and the kernels that they permit.

This module imports torch, not FlashInfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.errors import ConfigError

FA3_CAPABILITY = 90
"""The only compute capability · 10 of the FA3 kernels."""

TRTLLM_CAPABILITIES = frozenset({100, 103})
TRTLLM_BLOCK_SIZES = frozenset({16, 32, 64})
"""The page sizes of the trtllm-gen kernels. The other kernels support all page sizes."""

PDL_CAPABILITY = 90
"""Lowest compute capability · 10 for programmatic dependent launch: a kernel may start before the
previous kernel has ended."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Properties of a device.

    capability: compute capability · 10; 0 if the device has none. num_processors: multiprocessors.
    """

    capability: int
    num_processors: int

    @property
    def supports_pdl(self) -> bool:
        """Whether the device supports programmatic dependent launch."""
        return self.capability >= PDL_CAPABILITY


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a KV-cache group.

    prefill: "fa2" or "fa3", for requests with several tokens in the wrappers. Decodes use "fa2"
    with tensor cores. block_tables: whether layers without a soft cap use the trtllm-gen kernels,
    which read block tables, instead of the wrappers.
    """

    prefill: str
    block_tables: bool


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the properties of a CUDA device; raise ConfigError for other devices."""
    if device.type != "cuda":
        raise ConfigError(
            f"the attention backend 'flashinfer' cannot use the device {device}; it supports CUDA "
            "devices only. Choose attention_backend='torch'"
        )
    result = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        capability=10 * result.major + result.minor, num_processors=result.multi_processor_count
    )


def select_kernels(
    facts: DeviceFacts, requested: str, block_size: int, *, is_fp8: bool = False
) -> Kernels:
    """Return the kernels for a device; raise ConfigError if they do not support it.

    requested: the `kernels` option. "auto" falls back to the wrappers if trtllm-gen does not
    support the block size. is_fp8: whether the cache is fp8. FA3 and trtllm-gen would need queries
    of fp8, so FA2 computes all layers, which converts keys and values.
    """
    shown = f"the GPU has compute capability {facts.capability / 10}"
    has_trtllm = facts.capability in TRTLLM_CAPABILITIES
    if is_fp8:
        if requested in ("fa3", "trtllm-gen"):
            raise ConfigError(
                f"the option kernels={requested!r} does not support fp8 caches with queries of 16 "
                "bits; set kernels='auto', or kv_cache_dtype='auto'"
            )
        return Kernels(prefill="fa2", block_tables=False)
    if requested == "fa3" and facts.capability != FA3_CAPABILITY:
        raise ConfigError(
            f"the option kernels='fa3' needs compute capability 9.0, but {shown}; set "
            "kernels='auto'"
        )
    if requested == "trtllm-gen" and not has_trtllm:
        raise ConfigError(
            f"the option kernels='trtllm-gen' needs compute capability 10.0 or 10.3, but {shown}; "
            "set kernels='auto'"
        )
    if requested == "trtllm-gen" and block_size not in TRTLLM_BLOCK_SIZES:
        raise ConfigError(
            f"the option kernels='trtllm-gen' does not support blocks of {block_size} tokens; set "
            "block_size to 16, 32 or 64, or kernels='auto'"
        )
    wants_trtllm = requested in ("auto", "trtllm-gen")
    wants_fa3 = requested in ("auto", "fa3")
    return Kernels(
        prefill="fa3" if wants_fa3 and facts.capability == FA3_CAPABILITY else "fa2",
        block_tables=wants_trtllm and has_trtllm and block_size in TRTLLM_BLOCK_SIZES,
    )
