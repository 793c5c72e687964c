"""Builds the metadata of a step: its tensors, and the scheduler metadata of its layers.

The builder cannot compute scheduler metadata, because they depend on a layer's heads and soft cap.
The first layer of a step that needs them computes them for all layers of the same shape. For a
graph, all tensors stay at their addresses and are recomputed before each replay.
"""

from __future__ import annotations

import torch

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionMetadataBuilder,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flash_attn.layout import StepLayout
from dovetail_attn_flash_attn.options import FlashAttentionOptions
from dovetail_attn_flash_attn.providers.provider import LayerShape, Provider


class FlashAttentionMetadata:
    """A step, and its scheduler metadata by provider and layer shape.

    spec: the spec of the KV-cache group. step: tensors of the step.
    """

    def __init__(self, spec: FullAttentionSpec, step: StepLayout) -> None:
        self.spec = spec
        self.step = step

    def scheduler_metadata(self, provider: Provider, shape: LayerShape) -> torch.Tensor | None:
        """Return the scheduler metadata of a layer, computed once per step and shape."""
        if not provider.has_scheduler_metadata(shape):
            return None
        key = (provider.name, shape)
        return self.step.kept.get(key, lambda: provider.scheduler_metadata(shape, self.step))


class FlashAttentionBuilder(AttentionMetadataBuilder):
    """Returns the metadata of each step. It owns no memory."""

    def __init__(self, context: AttentionGroupContext, options: FlashAttentionOptions) -> None:
        self._spec = context.spec
        self._graph_splits = options.graph_splits

    def build(self, batch: AttentionBatch) -> FlashAttentionMetadata:
        """Return this step's metadata. Only reads `batch`. Does not wait for a device."""
        return FlashAttentionMetadata(self._spec, StepLayout(self._spec, batch))

    def build_for_graph(self, batch: AttentionBatch) -> FlashAttentionMetadata:
        """Return the metadata of captured decodes, with one token per request."""
        return FlashAttentionMetadata(self._spec, StepLayout(self._spec, batch, self._graph_splits))

    def update_for_replay(self, metadata: FlashAttentionMetadata, batch: AttentionBatch) -> None:
        """Compute the tensors of a graph for the requests of `batch`.

        Does not wait for a device.
        """
        metadata.step.refresh(batch)
