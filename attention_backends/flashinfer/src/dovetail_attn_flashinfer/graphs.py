"""The metadata of captured decodes: everything that a graph reads stays at its address.

The wrappers are planned again before each replay; their plans are in memory at fixed addresses. The
trtllm-gen kernels have no plan, and read tables that are recomputed.

Shape legend: R requests, M width of a block table, B block size, S slots.
"""

from __future__ import annotations

import torch

from dovetail.interfaces.attention import AttentionBatch
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flashinfer.layout import PageTables, Part, StepLayout
from dovetail_attn_flashinfer.metadata import GroupKernels, StepMetadata, StepPlan, slots_of
from dovetail_attn_flashinfer.shape import Launch, LayerShape
from dovetail_attn_flashinfer.wrappers import GraphSize


class GraphMetadata(StepMetadata):
    """A captured step of decodes, with one token per request."""

    def __init__(self, batch: AttentionBatch, kernels: GroupKernels) -> None:
        """batch: its seq_lens are the maximum lengths."""
        super().__init__(batch, kernels)
        self.slots = _kept(self.slots)
        spec = self.spec
        self._max_key_len = max_key_len(batch, spec)
        num_rows, num_pages = batch.num_requests, -(-self._max_key_len // spec.block_size)
        self._size = GraphSize(num_rows=num_rows, max_pages=num_rows * num_pages)
        self._batch = batch
        self._layout: StepLayout | None = None
        self._tables: GraphTables | None = None
        self._planned: list[LayerShape] = []

    def update(self, batch: AttentionBatch) -> None:
        """Compute everything for the requests of `batch`, whose tensors have the same addresses."""
        self._batch, self._layout = batch, None
        for old, new in zip(self.slots, slots_of(batch, self.spec.block_size), strict=True):
            old.copy_(new)
        if self._tables is not None:
            self._tables.refresh(batch)
        for shape in self._planned:
            self._plan_wrapper(shape)

    def _make(self, shape: LayerShape) -> StepPlan:
        trtllm = self._kernels.trtllm_for(shape)
        if trtllm is None:
            self._planned.append(shape)
            return StepPlan(launches=(self._plan_wrapper(shape),), unused_slots=None)
        if self._tables is None:
            self._tables = GraphTables(self._batch, self.spec, self._max_key_len)
        num_rows = self._size.num_rows
        part = Part(
            is_decode=True,
            rows=slice(0, num_rows),
            tokens=slice(0, num_rows),
            query_lens=[1] * num_rows,
            key_lens=[self._max_key_len] * num_rows,
        )
        return StepPlan(
            launches=(trtllm.launch(shape, part, self._tables.tables),),
            unused_slots=self._tables.unused_slots,
        )

    def _plan_wrapper(self, shape: LayerShape) -> Launch:
        if self._layout is None:
            spec = self.spec
            self._layout = StepLayout(self._batch, spec.block_size, spec.sliding_window)
        (part,) = self._layout.parts()
        lists = self._layout.page_lists(part)
        return self._kernels.wrappers.launch(shape, part, lists, self._size)


class GraphTables:
    """The blocks of captured decodes as a table at fixed addresses, and their unused slots.

    unused_slots: block and offset, int64 [R · B], of the slots after each request's last token.
    Slots that are in use are replaced by slots of block 0, which is never allocated.
    """

    def __init__(self, batch: AttentionBatch, spec: FullAttentionSpec, max_key_len: int) -> None:
        self._spec = spec
        self._width = -(-max_key_len // spec.block_size)
        self._columns = _kept(self._compute(batch))
        table_RM, key_lens_R, unused_blocks_S = self._columns
        self.tables = PageTables(
            table_RM=table_RM, key_lens_R=key_lens_R, query_start_R1=None, key_start_R1=None
        )
        offsets_B = torch.arange(spec.block_size, device=table_RM.device)
        (offsets_S,) = _kept((offsets_B.repeat(batch.num_requests),))
        self.unused_slots = unused_blocks_S, offsets_S

    def refresh(self, batch: AttentionBatch) -> None:
        """Compute the table and the slots for the requests of `batch`, without waiting."""
        for old, new in zip(self._columns, self._compute(batch), strict=True):
            old.copy_(new)

    def _compute(self, batch: AttentionBatch) -> tuple[torch.Tensor, ...]:
        size, window = self._spec.block_size, self._spec.sliding_window
        table_RM, key_lens_R = batch.block_table_RM[:, : self._width], batch.seq_lens_R
        if window:
            firsts_R = (key_lens_R - window).clamp_(min=0) // size
            columns_RM = firsts_R[:, None] + torch.arange(self._width, device=firsts_R.device)
            last = batch.block_table_RM.shape[1] - 1
            table_RM = batch.block_table_RM.gather(1, columns_RM.clamp_(max=last))
            key_lens_R = key_lens_R - firsts_R * size
        last_R1 = (key_lens_R.long() - 1)[:, None]
        is_unused_RB = torch.arange(size, device=last_R1.device) > last_R1 % size
        blocks_RB = torch.where(is_unused_RB, table_RM.gather(1, last_R1 // size), 0)
        return table_RM, key_lens_R, blocks_RB.long().flatten()


def max_key_len(batch: AttentionBatch, spec: FullAttentionSpec) -> int:
    """Return the maximum number of positions in the listed blocks of a request.

    With a window, the first listed block contains up to block_size - 1 positions before it.
    """
    longest, window = max(batch.seq_lens), spec.sliding_window
    return min(longest, window + spec.block_size - 1) if window else longest


def _kept(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return contiguous copies that may be updated inside and outside of inference mode."""
    with torch.inference_mode(False):
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
