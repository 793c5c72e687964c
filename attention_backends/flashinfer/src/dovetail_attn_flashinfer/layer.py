"""Attention of one layer: writes the cache and runs the launches of the step's plan.

Shape legend: T tokens of the step, H query heads, K key-value heads, D head size, N blocks,
B block size.
"""

from __future__ import annotations

import torch

from dovetail.errors import ContractError
from dovetail.interfaces.attention import AttentionLayer, AttentionLayerContext, RotaryArgs
from dovetail_attn_flashinfer.cache_dtype import FP8_TYPES, as_bytes, to_fp8
from dovetail_attn_flashinfer.metadata import StepMetadata, StepPlan
from dovetail_attn_flashinfer.shape import LayerShape


class FlashInferAttentionLayer(AttentionLayer):
    """Attention of one layer over a cache of shape [N, 2, K, B, D].

    With an fp8 cache, the scale of keys multiplies the queries, and the scale of values the result.
    FlashInfer's arguments for scales are numbers on the host, which a graph would not update when
    weights are reloaded.
    """

    def __init__(self, context: AttentionLayerContext) -> None:
        self._context = context
        self._kv_cache: torch.Tensor | None = None
        self._fp8: torch.dtype | None = None
        self._kv_scales: torch.Tensor | None = None
        self._shape = LayerShape(
            num_heads=context.num_heads,
            scale=context.scale,
            soft_cap=context.soft_cap,
            has_sinks=context.sinks is not None,
            dtype=context.dtype,
        )
        self._zero = torch.zeros((), dtype=context.dtype, device=context.device)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: StepMetadata,
        out_THD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`.

        q, k, v and out may be strided; blocks may be strided. rotary_args: always None, because the
        backend does not declare "rotary". Raises ContractError if the layer's window, heads or head
        size differ from its KV-cache group.
        """
        if kv_cache is not self._kv_cache:
            self._bind(kv_cache, metadata)
        if not q_THD.shape[0]:
            return
        plan, scales = metadata.plan(self._shape), self._kv_scales
        if self._fp8 is not None:
            k_scale, v_scale = (None, None) if scales is None else scales
            k_TKD, v_TKD = to_fp8(k_TKD, k_scale, self._fp8), to_fp8(v_TKD, v_scale, self._fp8)
        self._write(k_TKD, v_TKD, kv_cache, metadata, plan)
        if scales is not None:
            q_THD = q_THD * scales[0]
        if q_THD.stride(-1) != 1:
            q_THD = q_THD.contiguous()
        # The FA2 and trtllm-gen kernels ignore the strides of the result.
        result_THD = out_THD
        if not out_THD.is_contiguous():
            result_THD = torch.empty_like(out_THD, memory_format=torch.contiguous_format)
        for launch in plan.launches:
            launch(q_THD, kv_cache, self._context.sinks, result_THD)
        if scales is not None:
            result_THD.mul_(scales[1])
        if result_THD is not out_THD:
            out_THD.copy_(result_THD)

    def _bind(self, kv_cache: torch.Tensor, metadata: StepMetadata) -> None:
        """Check the layer's cache, which is never replaced, and find its scales."""
        context, spec = self._context, metadata.spec
        own = (context.sliding_window, context.num_kv_heads, context.head_size)
        group = (spec.sliding_window, spec.num_kv_heads, spec.head_size)
        if own != group:
            raise ContractError(
                f"{context.layer_name} has (window, key-value heads, head size) = {own}, but its "
                f"KV-cache group has {group}; put layers with different values into different "
                "groups"
            )
        self._fp8 = FP8_TYPES.get(spec.dtype)
        self._kv_scales = None if self._fp8 is None else context.kv_scales
        self._kv_cache = kv_cache

    def _write(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: StepMetadata,
        plan: StepPlan,
    ) -> None:
        """Write keys and values, and clear the slots of values that a kernel would read.

        An indexed assignment is used instead of `flashinfer.append_paged_kv_cache`. The assignment
        needs only the slots, which are on the device in buffers of fixed addresses, so a CUDA graph
        can contain it. It supports any strides of blocks. FlashInfer's function needs a request and
        a position for each token, and page lists that start at position 0, which the lists of a
        sliding window do not.
        """
        keys_NKBD, values_NKBD = as_bytes(kv_cache).unbind(1)
        blocks_T, offsets_T = metadata.slots
        keys_NKBD[blocks_T, :, offsets_T] = as_bytes(k_TKD)
        values_NKBD[blocks_T, :, offsets_T] = as_bytes(v_TKD)
        if plan.unused_slots is not None:
            blocks_S, offsets_S = plan.unused_slots
            values_NKBD[blocks_S, :, offsets_S] = self._zero
