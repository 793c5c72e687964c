"""Attention of one layer: one native call writes the step's keys and values and attends to them.

The argument struct is created once; each call stores the addresses of its tensors in it. This
module does not depend on blocks, requests or positions.

Dimensions: T tokens of the step, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from dovetail.errors import ContractError
from dovetail.interfaces.attention import AttentionLayer, AttentionLayerContext
from dovetail_attn_cpu.metadata import CPUAttentionMetadata
from dovetail_cpu_kernels.attention import AttentionArgs, attention_operation

# Packs the first 14 members of AttentionArgs in one call.
_CHANGING = struct.Struct("@14q")


class CPUAttentionLayer(AttentionLayer):
    """Attention of one layer over packed blocks.

    args: the argument struct of the last call. Its address is fixed, so a recorded step may keep
    it.
    """

    def __init__(self, context: AttentionLayerContext) -> None:
        self._context = context
        self._operation = attention_operation()
        self._metadata: CPUAttentionMetadata | None = None
        self.args = AttentionArgs(
            num_heads=context.num_heads,
            num_kv_heads=context.num_kv_heads,
            head_size=context.head_size,
            value_size=context.value_size,
            window=context.sliding_window,
            scale=context.scale,
            soft_cap=context.soft_cap,
        )
        self._address = ctypes.addressof(self.args)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        out_THD: torch.Tensor,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`.

        bf16; q, k, v and out may be strided except in the last dimension; blocks may be strided.
        Raises ContractError if the layer's window, heads or head size differ from its group's.
        """
        if metadata is not self._metadata:
            self._bind(metadata)
        sinks_H = self._context.sinks
        if sinks_H is not None:  # weights that are reloaded may have a different address
            self.args.sinks = sinks_H.data_ptr()
        q_stride, k_stride, v_stride = q_THD.stride(), k_TKD.stride(), v_TKD.stride()
        out_stride = out_THD.stride()
        _CHANGING.pack_into(
            self.args,
            0,
            q_THD.data_ptr(),
            k_TKD.data_ptr(),
            v_TKD.data_ptr(),
            out_THD.data_ptr(),
            q_stride[0],
            q_stride[1],
            k_stride[0],
            k_stride[1],
            v_stride[0],
            v_stride[1],
            out_stride[0],
            out_stride[1],
            kv_cache.data_ptr(),
            kv_cache.stride(0) * kv_cache.itemsize,
        )
        self._operation(self._address)

    def _bind(self, metadata: CPUAttentionMetadata) -> None:
        """Store the addresses of the group's metadata, which never change, in the struct."""
        context = self._context
        own = (context.sliding_window, context.num_kv_heads, context.head_size)
        group = (metadata.sliding_window, metadata.num_kv_heads, metadata.head_size)
        if own != group:
            raise ContractError(
                f"{context.layer_name} has (window, key-value heads, head size) = {own}, but its "
                f"KV-cache group has {group}; put layers with different values into different "
                "groups"
            )
        args = self.args
        args.batch = ctypes.addressof(metadata.size)
        args.query_start = metadata.query_start_R1.data_ptr()
        args.seq_lens = metadata.seq_lens_R.data_ptr()
        args.block_table = metadata.block_table_RM.data_ptr()
        args.block_table_stride = metadata.block_table_RM.stride(0)
        args.slot_mapping = metadata.slot_mapping_T.data_ptr()
        args.workspace = metadata.workspace.data_ptr()
        args.workspace_floats = metadata.workspace.numel()
        args.block_size = metadata.block_size
        args.cache_kind = metadata.cache_kind
        self._metadata = metadata
