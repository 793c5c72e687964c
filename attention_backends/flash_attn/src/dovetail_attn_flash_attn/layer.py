"""Attention of one layer: writes the cache and calls the kernels of the selected provider.

Dimensions: T tokens of the step, H query heads, K key-value heads, D head size, N blocks,
B block size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dovetail.errors import ContractError
from dovetail.interfaces.attention import AttentionLayer, AttentionLayerContext, RotaryArgs
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flash_attn.metadata import FlashAttentionMetadata
from dovetail_attn_flash_attn.providers.provider import FP8, CallTensors, LayerShape, Provider

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max

Select = Callable[[FullAttentionSpec], Provider]


class FlashAttentionLayer(AttentionLayer):
    """Attention of one layer over a cache of shape [N, 2, B, K, D].

    capability: compute capability · 10 of the device. select: returns the provider for a cache, and
    raises ConfigError if there is none. With an fp8 cache, queries are fp8 too, with a scale of 1.
    """

    def __init__(self, context: AttentionLayerContext, capability: int, select: Select) -> None:
        self._context = context
        self._select = select
        self._provider: Provider | None = None
        self._kv_scales: torch.Tensor | None = None
        self._shape = LayerShape(
            num_heads=context.num_heads,
            num_kv_heads=context.num_kv_heads,
            head_size=context.head_size,
            scale=context.scale,
            soft_cap=context.soft_cap,
            window=context.sliding_window,
            dtype=context.dtype,
            capability=capability,
        )
        self._zero = torch.zeros((), dtype=context.dtype, device=context.device)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata,
        out_THD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`.

        q, k, v and out may be strided; blocks may be strided. rotary_args: always None, because the
        backend does not declare "rotary". Raises ContractError if the layer's window, heads or head
        size differ from its KV-cache group, and ConfigError if no provider supports the group's
        block size.
        """
        provider = self._provider or self._bind(metadata.spec)
        if not q_THD.shape[0]:
            return
        step, shape, kv_scales = metadata.step, self._shape, self._kv_scales
        keys_NBKD, values_NBKD = kv_cache.unbind(1)
        if kv_scales is not None:
            q_THD = to_fp8(q_THD)
            k_TKD, v_TKD = to_fp8(k_TKD, kv_scales[0]), to_fp8(v_TKD, kv_scales[1])
        # An indexed assignment supports any strides of blocks, and a graph can contain it.
        slots = step.slots()
        writable(keys_NBKD)[slots] = writable(k_TKD)
        writable(values_NBKD)[slots] = writable(v_TKD)
        if provider.reads_whole_pages(shape, step):
            writable(values_NBKD)[step.unused_slots()] = self._zero
        if q_THD.stride(-1) != 1:
            q_THD = q_THD.contiguous()
        result_THD = out_THD
        if not out_THD.is_contiguous():
            result_THD = torch.empty_like(out_THD, memory_format=torch.contiguous_format)
        tensors = CallTensors(
            q_THD=q_THD,
            keys_NBKD=keys_NBKD,
            values_NBKD=values_NBKD,
            sinks_H=self._context.sinks,
            kv_scales=kv_scales,
            out_THD=result_THD,
        )
        provider.forward(shape, step, tensors, metadata.scheduler_metadata(provider, shape))
        if result_THD is not out_THD:
            out_THD.copy_(result_THD)

    def _bind(self, spec: FullAttentionSpec) -> Provider:
        """Compare the layer with its KV-cache group, and select its provider."""
        context = self._context
        own = (context.sliding_window, context.num_kv_heads, context.head_size)
        group = (spec.sliding_window, spec.num_kv_heads, spec.head_size)
        if own != group:
            raise ContractError(
                f"{context.layer_name} has (window, key-value heads, head size) = {own}, but its "
                f"KV-cache group has {group}; put layers with different values into different "
                "groups"
            )
        self._provider = self._select(spec)
        if spec.dtype == FP8:
            ones = torch.ones(2, device=context.device)
            self._kv_scales = ones if context.kv_scales is None else context.kv_scales
            self._shape = replace(self._shape, dtype=FP8_DTYPE)
            self._zero = self._zero.to(torch.uint8)
        return self._provider


def to_fp8(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return x / scale in e4m3, clamped to its largest numbers. NaN stays NaN."""
    scaled = x.float() if scale is None else x.float() / scale
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def writable(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or its bytes if it is fp8: not all devices can assign fp8 values by index."""
    return x.view(torch.uint8) if x.dtype == FP8_DTYPE else x
