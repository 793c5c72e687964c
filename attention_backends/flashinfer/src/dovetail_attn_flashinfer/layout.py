"""Describes a step in the forms that FlashInfer's kernels read.

This module imports torch, not FlashInfer.

The listed blocks of a request are those from the first block that its first query sees up to its
last token. Blocks before a sliding
window may belong to other requests and contain NaN. The kernels read whole tiles of keys and
values and multiply masked values by 0, so these blocks must not be listed. Attention does not use
absolute positions of keys, so omitting these blocks does not change results.

Lengths come from the host columns of the batch, and block ids from its device tensors: nothing
waits for the device.

Shape legend: R requests of a step or of a part, T tokens, M width of a block table, N listed
blocks, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from dovetail.interfaces.attention import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive requests of a step that one launch computes.

    is_decode: whether all requests have one token. rows, tokens: the requests and their tokens in
    the step. query_lens, key_lens: numbers of tokens and of listed positions of each request.
    """

    is_decode: bool
    rows: slice
    tokens: slice
    query_lens: Sequence[int]
    key_lens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLists:
    """The blocks of a part as compressed rows.

    query_indptr_R1, page_indptr_R1, last_page_len_R, key_lens_R: int32 on the host (page-locked for
    a GPU); FlashInfer would otherwise copy them from the device and wait. pages_N: int32 on the
    device. last_page_len: tokens in a request's last block, from 1 to the block size.
    """

    query_indptr_R1: torch.Tensor
    page_indptr_R1: torch.Tensor
    last_page_len_R: torch.Tensor
    key_lens_R: torch.Tensor
    pages_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTables:
    """The blocks of a step as a table, without the blocks before the window. All on the device.

    table_RM: int32, contiguous; entries after a row's blocks are any valid block ids.
    key_lens_R: int32. query_start_R1, key_start_R1: int32, cumulative lengths; None for a graph,
    whose requests have one query each.
    """

    table_RM: torch.Tensor
    key_lens_R: torch.Tensor
    query_start_R1: torch.Tensor | None
    key_start_R1: torch.Tensor | None


def without_empty_runs(batch: AttentionBatch) -> AttentionBatch:
    """Return `batch` without requests that have no tokens in the step."""
    if all(batch.query_lens):
        return batch
    rows = [row for row, count in enumerate(batch.query_lens) if count]
    rows_R = _to_device([*rows, len(batch.query_lens)], torch.int64, batch.seq_lens_R.device)
    return replace(
        batch,
        query_start_R1=batch.query_start_R1[rows_R],
        seq_lens_R=batch.seq_lens_R[rows_R[:-1]],
        block_table_RM=batch.block_table_RM[rows_R[:-1]],
        query_lens=[batch.query_lens[row] for row in rows],
        seq_lens=[batch.seq_lens[row] for row in rows],
    )


class StepLayout:
    """The blocks of a step, whose requests must all have tokens.

    window: the sliding window of the group, or 0. Everything is computed at the first access.
    """

    def __init__(self, batch: AttentionBatch, block_size: int, window: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._first_blocks = first_blocks(batch, block_size, window)
        lens = zip(batch.seq_lens, self._first_blocks, strict=True)
        self._key_lens = [seq_len - first * block_size for seq_len, first in lens]
        self._page_ends = list(accumulate(-(-length // block_size) for length in self._key_lens))
        self._parts: tuple[Part, ...] | None = None
        self._pages_N: torch.Tensor | None = None
        self._lists: dict[bool, PageLists] = {}
        self._tables: PageTables | None = None

    def parts(self) -> tuple[Part, ...]:
        """Return the decodes at the start of the step, and all other requests, if there are any."""
        if self._parts is None:
            num_rows = self._batch.num_requests
            lens = enumerate(self._batch.query_lens)
            num_decodes = next((row for row, count in lens if count != 1), num_rows)
            places = [(True, 0, num_decodes), (False, num_decodes, num_rows)]
            self._parts = tuple(self._part(*place) for place in places if place[1] < place[2])
        return self._parts

    def _part(self, is_decode: bool, start: int, end: int) -> Part:
        query_lens = self._batch.query_lens[start:end]
        first = 0 if is_decode else start  # the runs before this part have one token each
        return Part(
            is_decode=is_decode,
            rows=slice(start, end),
            tokens=slice(first, first + sum(query_lens)),
            query_lens=query_lens,
            key_lens=self._key_lens[start:end],
        )

    def page_lists(self, part: Part) -> PageLists:
        """Return the blocks of a part as compressed rows."""
        result = self._lists.get(part.is_decode)
        if result is None:
            result = self._lists[part.is_decode] = self._page_lists(part)
        return result

    def _page_lists(self, part: Part) -> PageLists:
        if self._pages_N is None:
            self._pages_N = self._list_pages()
        size, device = self._block_size, self._pages_N.device
        before = self._page_ends[part.rows.start - 1] if part.rows.start else 0
        ends = [end - before for end in self._page_ends[part.rows]]
        last_lens = [(length - 1) % size + 1 for length in part.key_lens]
        return PageLists(
            query_indptr_R1=_on_host([0, *accumulate(part.query_lens)], torch.int32, device),
            page_indptr_R1=_on_host([0, *ends], torch.int32, device),
            last_page_len_R=_on_host(last_lens, torch.int32, device),
            key_lens_R=_on_host(part.key_lens, torch.int32, device),
            pages_N=self._pages_N[before : before + ends[-1]],
        )

    def _list_pages(self) -> torch.Tensor:
        """Return the blocks of all requests, one request after another."""
        table_RM = self._batch.block_table_RM
        starts = [0, *self._page_ends[:-1]]
        counts = [end - start for start, end in zip(starts, self._page_ends, strict=True)]
        pairs = zip(self._first_blocks, starts, strict=True)
        rows_N, columns_N = _repeated(counts, [first - start for first, start in pairs], table_RM)
        return table_RM[rows_N, columns_N]

    def page_tables(self) -> PageTables:
        """Return the blocks of the step as a table."""
        if self._tables is None:
            self._tables = self._page_tables()
        return self._tables

    def _page_tables(self) -> PageTables:
        batch = self._batch
        table_RM, key_lens_R = batch.block_table_RM, batch.seq_lens_R
        if any(self._first_blocks):
            device = table_RM.device
            firsts_R = _to_device(self._first_blocks, torch.int64, device)
            width = -(-max(self._key_lens) // self._block_size)
            columns_RM = firsts_R[:, None] + torch.arange(width, device=device)
            table_RM = table_RM.gather(1, columns_RM.clamp_(max=table_RM.shape[1] - 1))
            key_lens_R = key_lens_R - (firsts_R * self._block_size).to(torch.int32)
        key_start_R1 = torch.nn.functional.pad(key_lens_R.cumsum(0, dtype=torch.int32), (1, 0))
        return PageTables(
            table_RM=table_RM.contiguous(),
            key_lens_R=key_lens_R.contiguous(),
            query_start_R1=batch.query_start_R1,
            key_start_R1=key_start_R1,
        )

    def unused_slots(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return block and offset, int64 [S], of each slot after the last token of a request.

        Only the last block of each request counts. It contains a token of this step, so no other
        request reads it. Returns None if there are no such slots.
        """
        size, table_RM = self._block_size, self._batch.block_table_RM
        counts = [-seq_len % size for seq_len in self._batch.seq_lens]
        if not any(counts):
            return None
        blocks = [(seq_len - 1) // size for seq_len in self._batch.seq_lens]
        rows_S, shifts_S = _repeated(counts, [size - end for end in accumulate(counts)], table_RM)
        columns_R = _to_device(blocks, torch.int64, table_RM.device)
        blocks_R1 = table_RM.gather(1, columns_R[:, None])
        return blocks_R1[rows_S, 0].long(), shifts_S


def first_blocks(batch: AttentionBatch, block_size: int, window: int) -> list[int]:
    """Return, for each request, the index of the first block that its first query sees."""
    if not window:
        return [0] * batch.num_requests
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    return [max(0, seq_len - query_len + 1 - window) // block_size for query_len, seq_len in lens]


def _on_host(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a host tensor that can be copied to `device` without waiting."""
    pageable = torch.tensor(values, dtype=dtype)
    if device.type == pageable.device.type:
        return pageable
    return torch.empty(pageable.shape, dtype=dtype, pin_memory=True).copy_(pageable)


def _to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _on_host(values, dtype, device).to(device, non_blocking=True)


def _repeated(
    counts: Sequence[int], shifts: Sequence[int], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two int64 tensors of length sum(counts) on the device of `like`.

    Row i has counts[i] consecutive items. In the first tensor, they are i. In the second tensor,
    item n, counted over all rows, is n + shifts[i].
    """
    counts_R, shifts_R = _to_device([counts, shifts], torch.int64, like.device)
    total = sum(counts)
    # With `output_size`, the length of the result is known without waiting for the device.
    rows_N = torch.arange(len(counts), device=like.device).repeat_interleave(
        counts_R, output_size=total
    )
    return rows_N, torch.arange(total, device=like.device) + shifts_R[rows_N]
