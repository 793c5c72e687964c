"""The metadata of a step: the launches of its layers.

A plan depends on a layer's heads, scale, soft cap and sinks. The first layer that needs a plan in a
step creates it for all layers of the same shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from dovetail.interfaces.attention import AttentionBatch
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flashinfer.layout import StepLayout, without_empty_runs
from dovetail_attn_flashinfer.shape import Launch, LayerShape
from dovetail_attn_flashinfer.trtllm import TrtllmLauncher
from dovetail_attn_flashinfer.wrappers import WrapperPool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The operations of a layer in a step after it has written keys and values.

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

    def trtllm_for(self, shape: LayerShape) -> TrtllmLauncher | None:
        """Return the launcher for layers of `shape`, or None if they use the wrappers."""
        return None if shape.soft_cap else self.trtllm


class StepMetadata(ABC):
    """A step, and its plans by layer shape.

    spec: the spec of the KV-cache group. slots: block and offset, int64, of each token's slot.
    """

    def __init__(self, batch: AttentionBatch, kernels: GroupKernels) -> None:
        self.spec = kernels.spec
        self.slots = slots_of(batch, self.spec.block_size)
        self._kernels = kernels
        self._plans: dict[LayerShape, StepPlan] = {}

    def plan(self, shape: LayerShape) -> StepPlan:
        """Return the plan of a layer; a shape's first call creates it."""
        result = self._plans.get(shape)
        if result is None:
            result = self._plans[shape] = self._make(shape)
        return result

    @abstractmethod
    def _make(self, shape: LayerShape) -> StepPlan:
        """Return the plan of the layers of `shape`."""


def slots_of(batch: AttentionBatch, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block and offset of each token's slot, int64 [T]."""
    return batch.slot_mapping_T // block_size, batch.slot_mapping_T % block_size


class FlashInferMetadata(StepMetadata):
    """The metadata of a step that runs without a graph."""

    def __init__(self, batch: AttentionBatch, kernels: GroupKernels) -> None:
        super().__init__(batch, kernels)
        spec = self.spec
        self._layout = StepLayout(without_empty_runs(batch), spec.block_size, spec.sliding_window)
        self._unused_slots: list[tuple[torch.Tensor, torch.Tensor] | None] = []

    def _make(self, shape: LayerShape) -> StepPlan:
        layout, trtllm = self._layout, self._kernels.trtllm_for(shape)
        if trtllm is not None:
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
