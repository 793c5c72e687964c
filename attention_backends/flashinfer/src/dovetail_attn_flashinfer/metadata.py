"""Builds the metadata of a step: the launches of its layers.

The builder cannot plan, because a plan depends on a layer's heads, scale, soft cap and sinks. The
first layer of a step that asks plans for all layers of the same shape. All memory is allocated
before the first step, except the wrappers' own buffers, which the first step of a shape allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionMetadataBuilder,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flashinfer.device_facts import DeviceFacts, select_kernels
from dovetail_attn_flashinfer.layout import StepLayout, without_empty_runs
from dovetail_attn_flashinfer.options import FlashInferAttentionOptions
from dovetail_attn_flashinfer.shape import Launch, LayerShape
from dovetail_attn_flashinfer.trtllm import TrtllmLauncher
from dovetail_attn_flashinfer.wrappers import WrapperPool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a layer does in a step after it has written keys and values.

    launches: one for each part of the step. unused_slots: block and offset of the slots of values
    that must be cleared first, or None.
    """

    launches: tuple[Launch, ...]
    unused_slots: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKernels:
    """The kernels of a KV-cache group and their memory. trtllm: None if the device has none."""

    spec: FullAttentionSpec
    wrappers: WrapperPool
    trtllm: TrtllmLauncher | None


class FlashInferMetadata:
    """A step, and its plans by layer shape.

    spec: of the KV-cache group. slots: block and offset, int64, of each token's slot.
    """

    def __init__(self, batch: AttentionBatch, kernels: GroupKernels) -> None:
        self.spec = kernels.spec
        size = self.spec.block_size
        self.slots = (batch.slot_mapping_T // size, batch.slot_mapping_T % size)
        self._kernels = kernels
        self._layout = StepLayout(without_empty_runs(batch), size, self.spec.sliding_window)
        self._plans: dict[LayerShape, StepPlan] = {}
        self._unused_slots: list[tuple[torch.Tensor, torch.Tensor] | None] = []

    def plan(self, shape: LayerShape) -> StepPlan:
        """Return the plan of a layer; in each step, a shape's first call creates it."""
        found = self._plans.get(shape)
        if found is None:
            found = self._plans[shape] = self._make(shape)
        return found

    def _make(self, shape: LayerShape) -> StepPlan:
        layout, trtllm = self._layout, self._kernels.trtllm
        if trtllm is not None and not shape.soft_cap:
            tables = layout.page_tables()
            return StepPlan(
                launches=tuple(trtllm.launch(shape, part, tables) for part in layout.parts()),
                unused_slots=self._slots_to_clear(),
            )
        pool = self._kernels.wrappers
        return StepPlan(
            launches=tuple(
                pool.launch(shape, part, layout.page_lists(part)) for part in layout.parts()
            ),
            unused_slots=None,
        )

    def _slots_to_clear(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._unused_slots:
            self._unused_slots.append(self._layout.unused_slots())
        return self._unused_slots[0]


class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Returns the metadata of each step, and owns the memory that all steps share."""

    def __init__(self, context: AttentionGroupContext, device: DeviceFacts) -> None:
        options = FlashInferAttentionOptions.model_validate(dict(context.options))
        spec = context.spec
        selected = select_kernels(device, options.kernels, spec.block_size)
        num_bytes = options.workspace_mib << 20
        # FlashInfer's documentation starts with zeros.
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=context.device)
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

    def build(self, batch: AttentionBatch) -> FlashInferMetadata:
        """Return this step's metadata. Only reads `batch`; does not wait for a device."""
        return FlashInferMetadata(batch, self._kernels)
