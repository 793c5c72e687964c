"""Builds the metadata of steps, and owns the memory that all steps of a KV-cache group share.

All memory is allocated before the first step, except the wrappers' own buffers, which the first
step of a layer shape allocates, and the buffers of graphs, which are allocated during their
capture.
"""

from __future__ import annotations

import torch

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionMetadataBuilder,
)
from dovetail_attn_flashinfer.cache_dtype import FP8_TYPES
from dovetail_attn_flashinfer.device_facts import DeviceFacts, select_kernels
from dovetail_attn_flashinfer.graphs import GraphMetadata
from dovetail_attn_flashinfer.metadata import FlashInferMetadata, GroupKernels
from dovetail_attn_flashinfer.options import FlashInferAttentionOptions
from dovetail_attn_flashinfer.trtllm import TrtllmLauncher
from dovetail_attn_flashinfer.wrappers import WrapperPool


class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Returns the metadata of each step, and owns the memory that all steps share.

    Decodes precede all other requests in each batch, so that one launch computes them.
    """

    reorder_threshold = 1

    def __init__(self, context: AttentionGroupContext, device: DeviceFacts) -> None:
        options = FlashInferAttentionOptions.model_validate(dict(context.options))
        spec = context.spec
        selected = select_kernels(
            device, options.kernels, spec.block_size, is_fp8=spec.dtype in FP8_TYPES
        )
        workspace = self._workspace(context, options.workspace_mib << 20)
        trtllm = None
        if selected.block_tables:
            trtllm = TrtllmLauncher(
                spec,
                workspace,
                max_num_seqs=context.max_num_seqs,
                num_processors=device.num_processors,
                pdl=device.supports_pdl,
            )
        self._kernels = GroupKernels(
            spec=spec,
            wrappers=WrapperPool(
                spec, workspace, prefill=selected.prefill, pdl=device.supports_pdl
            ),
            trtllm=trtllm,
        )

    @staticmethod
    def _workspace(context: AttentionGroupContext, num_bytes: int) -> torch.Tensor:
        """Return the worker's workspace, or else memory of this builder.

        FlashInfer requires zeros.
        """
        if context.workspace is not None:
            return context.workspace(num_bytes)[:num_bytes]
        return torch.zeros(num_bytes, dtype=torch.uint8, device=context.device)

    def build(self, batch: AttentionBatch) -> FlashInferMetadata:
        """Return this step's metadata. Only reads `batch`; does not wait for a device."""
        return FlashInferMetadata(batch, self._kernels)

    def build_for_graph(self, batch: AttentionBatch) -> GraphMetadata:
        """Return the metadata of captured decodes, with one token per request."""
        return GraphMetadata(batch, self._kernels)

    def update_for_replay(self, metadata: GraphMetadata, batch: AttentionBatch) -> None:
        """Plan the layers of a graph for the requests of `batch`."""
        metadata.update(batch)
