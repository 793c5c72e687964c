"""The tensors of a step that are computed from the batch, on the device and without waiting.

With a sliding window, the blocks before the window of a request's first query are omitted: they
may contain NaN of other requests, and the kernels multiply masked values by 0. Causal attention
with a window depends only on distances between positions, so the listed positions may start at any
block boundary.

Dimensions: R requests, T tokens, M width of a block table, B block size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dovetail.interfaces.attention import AttentionBatch
from dovetail.interfaces.kv_cache import FullAttentionSpec


class KeptTensors:
    """Tensors by key, each computed at its first use.

    If they are kept for a graph, `refresh` computes them again at the same addresses.
    """

    def __init__(self, *, for_graph: bool) -> None:
        self._for_graph = for_graph
        self._entries: dict[object, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {}

    def get(self, key: object, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of `key`."""
        entry = self._entries.get(key)
        if entry is None:
            value = compute()
            if self._for_graph:
                # Not an inference tensor: a replay may be prepared outside of inference mode.
                with torch.inference_mode(False):
                    value = value.clone()
            entry = self._entries[key] = (compute, value)
        return entry[1]

    def refresh(self) -> None:
        """Compute all tensors again, in the order of their first use."""
        for compute, value in self._entries.values():
            value.copy_(compute())


class StepLayout:
    """The blocks and lengths of a step for the layers of a KV-cache group.

    num_splits: 0 if the kernels choose the number of splits of a context, and a fixed maximum for a
    graph, whose requests have one query each. `refresh` replaces the batch of a graph.
    The properties are described in `StepTensors`.
    """

    def __init__(self, spec: FullAttentionSpec, batch: AttentionBatch, num_splits: int = 0) -> None:
        for_graph = num_splits > 0
        self.kept = KeptTensors(for_graph=for_graph)
        self.spec = spec
        self.block_size = spec.block_size
        self.num_rows = batch.num_requests
        self.num_splits = num_splits
        self.max_query_len = 1 if for_graph else max(batch.query_lens, default=0)
        self._batch = batch
        width = batch.block_table_RM.shape[1]
        # The last block of a table may be incomplete, and a table may have no columns.
        self._width = min(width, graph_width(spec, width) if for_graph else self._needed_width())

    def refresh(self, batch: AttentionBatch) -> None:
        """Compute everything for the requests of `batch`, whose tensors are the first batch's."""
        self._batch = batch
        self.kept.refresh()

    def _needed_width(self) -> int:
        """Return the number of blocks of the request with the most listed blocks."""
        size, window = self.spec.block_size, self.spec.sliding_window
        lens = zip(self._batch.query_lens, self._batch.seq_lens, strict=True)
        counts = [
            -(-seq_len // size) - first_block(seq_len - query_len, size, window)
            for query_len, seq_len in lens
        ]
        return max(counts, default=0)

    @property
    def max_key_len(self) -> int:
        """Number of positions in a row of the table.

        FA3 derives scheduler metadata from this number, so both of its operators must receive it.
        """
        return self._width * self.block_size

    @property
    def query_start_R1(self) -> torch.Tensor:  # noqa: N802
        """Cumulative number of queries, int32 [R + 1]."""
        return self._batch.query_start_R1

    @property
    def table_RM(self) -> torch.Tensor:  # noqa: N802
        """The listed blocks of each request, int32 [R, M]."""
        if not self.spec.sliding_window:
            return self._batch.block_table_RM[:, : self._width]
        return self.kept.get("table", self._windowed_table)

    @property
    def key_lens_R(self) -> torch.Tensor:  # noqa: N802
        """Number of listed positions of each request, int32 [R]."""
        if not self.spec.sliding_window:
            return self._batch.seq_lens_R
        return self.kept.get("key lengths", self._windowed_lens)

    @property
    def cu_key_lens_R1(self) -> torch.Tensor:  # noqa: N802
        """Cumulative `key_lens_R`, int32 [R + 1]."""
        return self.kept.get("key starts", self._key_starts)

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block and offset of each token's slot, int64 [T]."""
        size = self.block_size
        return (
            self.kept.get("slot blocks", lambda: self._batch.slot_mapping_T // size),
            self.kept.get("slot offsets", lambda: self._batch.slot_mapping_T % size),
        )

    def unused_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block and offset of the slots after each request's last token, int64 [R · B].

        The last block of a request contains a token of this step, so no other request reads it.
        Slots that are in use are replaced by slots of block 0, which is never allocated.
        """
        return (
            self.kept.get("unused blocks", self._unused_blocks),
            self.kept.get("unused offsets", self._unused_offsets),
        )

    def _first_blocks(self) -> torch.Tensor:
        """Return the index of the first block that each request's first query sees, int32 [R]."""
        batch, window = self._batch, self.spec.sliding_window
        first_positions_R = batch.seq_lens_R - batch.query_start_R1.diff() + 1 - window
        return first_positions_R.clamp_(min=0) // self.block_size

    def _windowed_table(self) -> torch.Tensor:
        table_RM = self._batch.block_table_RM
        firsts_R = self.kept.get("first blocks", self._first_blocks)
        columns_M = torch.arange(self._width, device=table_RM.device)
        columns_RM = firsts_R[:, None] + columns_M
        return table_RM.gather(1, columns_RM.clamp_(max=table_RM.shape[1] - 1))

    def _windowed_lens(self) -> torch.Tensor:
        firsts_R = self.kept.get("first blocks", self._first_blocks)
        return self._batch.seq_lens_R - firsts_R * self.block_size

    def _key_starts(self) -> torch.Tensor:
        ends_R = self.key_lens_R.cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(ends_R, (1, 0))

    def _unused_blocks(self) -> torch.Tensor:
        last_R1 = (self.key_lens_R.long() - 1)[:, None]
        blocks_R1 = self.table_RM.gather(1, last_R1 // self.block_size)
        offsets_B = torch.arange(self.block_size, device=last_R1.device)
        is_unused_RB = offsets_B > last_R1 % self.block_size
        return torch.where(is_unused_RB, blocks_R1, 0).long().flatten()

    def _unused_offsets(self) -> torch.Tensor:
        return torch.arange(self.block_size, device=self.table_RM.device).repeat(self.num_rows)


def first_block(context_len: int, block_size: int, window: int) -> int:
    """Return the index of the first block that the query at position `context_len` sees."""
    return max(0, context_len + 1 - window) // block_size if window else 0


def graph_width(spec: FullAttentionSpec, width: int) -> int:
    """Return the maximum number of blocks that one query sees.

    width: the width of the block table.
    """
    if not spec.sliding_window:
        return width
    return -(-(spec.sliding_window + spec.block_size - 1) // spec.block_size)
