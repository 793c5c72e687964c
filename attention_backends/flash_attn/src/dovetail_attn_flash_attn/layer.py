"""Attention of one layer: writes the cache and calls the kernels of the selected provider.

Shape legend: T tokens of the step, H query heads, K key-value heads, D head size, N blocks,
B block size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dovetail.errors import ContractError
from dovetail.interfaces.attention import AttentionLayer, AttentionLayerContext, RotaryArgs
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flash_attn.metadata import FlashAttentionMetadata
from dovetail_attn_flash_attn.providers.provider import CallTensors, LayerShape, Provider


class FlashAttentionLayer(AttentionLayer):
    """Attention of one layer over a cache of shape [N, 2, B, K, D].

    capability: compute capability · 10 of the device. select: returns the provider for a block
    size, and raises ConfigError if there is none.
    """

    def __init__(
        self, context: AttentionLayerContext, capability: int, select: Callable[[int], Provider]
    ) -> None:
        self._context = context
        self._select = select
        self._provider: Provider | None = None
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
        step, shape = metadata.step, self._shape
        keys_NBKD, values_NBKD = kv_cache.unbind(1)
        # An indexed assignment supports any strides of blocks, and a graph can contain it.
        slots = step.slots()
        keys_NBKD[slots] = k_TKD
        values_NBKD[slots] = v_TKD
        if provider.reads_whole_pages(shape, step):
            values_NBKD[step.unused_slots()] = self._zero
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
            out_THD=result_THD,
        )
        provider.forward(shape, step, tensors, metadata.schedule(provider, shape))
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
        self._provider = self._select(spec.block_size)
        return self._provider
