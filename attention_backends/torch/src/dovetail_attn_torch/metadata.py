"""All index computations of a step, done once for every layer of a KV-cache group.

A request with one token is a decode; decodes of similar length are computed together. A request
whose tokens are all in this step needs no cache: it is a prefill. Every other request is a chunk,
whose keys and values are gathered first. The builder depends on the group's cache, but not on the
query heads, scale and soft cap of a layer.

Dimensions: T tokens, R requests, M block-table width, B block size, K key-value heads,
D head size, C cached vectors per token and head: key and value, or only the key, of which the value
is a part; within a gathered batch G requests, L positions each, Q query tokens, S = G · L slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionMetadataBuilder,
)
from dovetail.interfaces.kv_cache import LatentAttentionSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Size of the keys and values of a batch of decodes. Small enough to stay in a processor cache from
# the gather to its use: gathering 64 rows of 512 tokens at once took 1.7 times as long.
SCRATCH_BYTES = 4 << 20

# A decode joins a batch if it is shorter than the longest decode by at most this many tokens, or by
# at most a quarter: more padding costs more than a separate batch.
MAX_PADDING = 128

Tokens = slice | torch.Tensor
"""Indices of tokens or rows of the step: a slice if they are consecutive, else int64 [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredBatch:
    """Requests whose keys and values are gathered from the cache.

    tokens: indices of the G · Q query tokens in the step.
    slots_S: int64; the L slots of request g, from the first visible position. Beyond the end of
        a request its last slot is repeated, so that only its memory is read.
    keys_values_SCKD: scratch memory for the gathered keys and values, shared by all layers.
    keys_GKLD, values_GKLD: views of it.
    positions_GL, query_positions_GQ: int64; the positions of the keys and of the query tokens.
    mask_G1QL: added to the scores, 0 or -inf, in the cache's dtype, broadcast along
        dimensions of 1; None if every query sees all L positions.
    """

    tokens: Tokens
    slots_S: torch.Tensor
    keys_values_SCKD: torch.Tensor
    keys_GKLD: torch.Tensor
    values_GKLD: torch.Tensor
    positions_GL: torch.Tensor
    query_positions_GQ: torch.Tensor
    mask_G1QL: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAttentionMetadata:
    """The metadata of a step for the layers of backend `torch`.

    slots_T: int64; the slot of each token's key and value.
    decodes: batches of requests with one token. chunks: batches of one request with more tokens and
        gathered keys. prefills: the tokens of requests that see only keys of this step, with a
        causal mask.
    sliding_window: the window of the masks; 0 for none.
    """

    slots_T: torch.Tensor
    decodes: tuple[GatheredBatch, ...]
    chunks: tuple[GatheredBatch, ...]
    prefills: tuple[slice, ...]
    sliding_window: int


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Builds `TorchAttentionMetadata`. Owns the scratch memory of gathered keys and values."""

    def __init__(self, context: AttentionGroupContext) -> None:
        spec = context.spec
        self._block_size = spec.block_size
        self._window = spec.sliding_window
        self._device = context.device
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._value_size = spec.head_size
        self._token_shape = (2, spec.num_kv_heads, spec.head_size)
        if isinstance(spec, LatentAttentionSpec):
            self._value_size = spec.value_size
            self._token_shape = (1, spec.num_kv_heads, spec.head_size)
        token_bytes = spec.page_size_bytes // spec.block_size
        self._max_decode_slots = max(1, SCRATCH_BYTES // token_bytes)
        self._scratch_SCKD = torch.empty(
            (0, *self._token_shape), dtype=self._dtype, device=self._device
        )

    def build(self, batch: AttentionBatch) -> TorchAttentionMetadata:
        """Return this step's metadata. Only reads `batch`. Does not wait for a device.

        The result shares scratch memory with the next one: do not use it after the next call.
        """
        query_lens, seq_lens = batch.query_lens, batch.seq_lens
        starts = list(accumulate(query_lens, initial=0))
        decode_rows: list[int] = []
        chunk_rows: list[int] = []
        prefills: list[slice] = []
        for row, query_len in enumerate(query_lens):
            if query_len == 1:
                decode_rows.append(row)
            elif query_len == seq_lens[row] and not 0 < self._window < query_len:
                prefills.append(slice(starts[row], starts[row + 1]))
            elif query_len:
                chunk_rows.append(row)
        seen_lens = [self._num_seen(length, 1) for length in seq_lens]
        groups = group_by_length(decode_rows, seen_lens, self._max_decode_slots)
        self._grow_scratch(
            max(
                max((len(group) * seen_lens[group[0]] for group in groups), default=0),
                max((self._num_seen(seq_lens[r], query_lens[r]) for r in chunk_rows), default=0),
            )
        )
        return TorchAttentionMetadata(
            slots_T=batch.slot_mapping_T,
            decodes=tuple(self._decode_batch(batch, rows, starts, seen_lens) for rows in groups),
            chunks=tuple(self._chunk(batch, row, starts[row]) for row in chunk_rows),
            prefills=tuple(prefills),
            sliding_window=self._window,
        )

    def _num_seen(self, seq_len: int, query_len: int) -> int:
        """Return the number of positions that at least one of the last `query_len` tokens sees."""
        return min(seq_len, self._window + query_len - 1) if self._window else seq_len

    def _decode_batch(
        self,
        batch: AttentionBatch,
        rows: Sequence[int],
        starts: Sequence[int],
        seen_lens: Sequence[int],
    ) -> GatheredBatch:
        """Return one batch of decodes. `rows` are ordered from the longest to the shortest."""
        max_len = seen_lens[rows[0]]
        which = self._indices(rows)
        ends_G1 = take(batch.seq_lens_R, which).long().unsqueeze(1)
        positions_GL = torch.arange(max_len, device=self._device).expand(len(rows), -1)
        if self._window:
            positions_GL = positions_GL + (ends_G1 - self._window).clamp_(min=0)
        is_padded = seen_lens[rows[-1]] < max_len
        mask = None
        if is_padded:
            mask = self._mask(positions_GL < ends_G1)[:, None, None, :]
        positions_GL = torch.minimum(positions_GL, ends_G1 - 1)
        return self._gathered(
            tokens=self._indices([starts[row] for row in rows]),
            slots_GL=self._slots(take(batch.block_table_RM, which), positions_GL),
            positions_GL=positions_GL,
            query_positions_GQ=ends_G1 - 1,
            mask_G1QL=mask,
        )

    def _chunk(self, batch: AttentionBatch, row: int, start: int) -> GatheredBatch:
        """Return the batch of one request with several tokens, with all positions that they see."""
        query_len, seq_len = batch.query_lens[row], batch.seq_lens[row]
        first = seq_len - self._num_seen(seq_len, query_len)
        positions_L = torch.arange(first, seq_len, device=self._device)
        mask_QL = self._mask(
            visible(positions_L[-query_len:].unsqueeze(1), positions_L, self._window)
        )
        table_1M = batch.block_table_RM[row : row + 1]
        return self._gathered(
            tokens=slice(start, start + query_len),
            slots_GL=self._slots(table_1M, positions_L.unsqueeze(0)),
            positions_GL=positions_L.unsqueeze(0),
            query_positions_GQ=positions_L[-query_len:].unsqueeze(0),
            mask_G1QL=mask_QL[None, None],
        )

    def _gathered(
        self,
        *,
        tokens: Tokens,
        slots_GL: torch.Tensor,
        positions_GL: torch.Tensor,
        query_positions_GQ: torch.Tensor,
        mask_G1QL: torch.Tensor | None,
    ) -> GatheredBatch:
        num_rows, length = slots_GL.shape
        keys_values_SCKD = self._scratch_SCKD[: num_rows * length]
        keys_values_CGKLD = keys_values_SCKD.unflatten(0, (num_rows, length)).permute(2, 0, 3, 1, 4)
        return GatheredBatch(
            tokens=tokens,
            slots_S=slots_GL.flatten(),
            keys_values_SCKD=keys_values_SCKD,
            keys_GKLD=keys_values_CGKLD[0],
            values_GKLD=keys_values_CGKLD[-1, ..., : self._value_size],
            positions_GL=positions_GL,
            query_positions_GQ=query_positions_GQ,
            mask_G1QL=mask_G1QL,
        )

    def _slots(self, table_GM: torch.Tensor, positions_GL: torch.Tensor) -> torch.Tensor:
        """Return the slots of positions: block · B + offset, int64 [G, L]."""
        columns_GL = positions_GL // self._block_size
        offsets_GL = positions_GL - columns_GL * self._block_size
        return table_GM.long().gather(1, columns_GL).mul_(self._block_size).add_(offsets_GL)

    def _mask(self, visible_QL: torch.Tensor) -> torch.Tensor:
        """Return an additive attention mask: -inf at masked positions, 0 elsewhere."""
        mask_QL = torch.zeros(visible_QL.shape, dtype=self._dtype, device=self._device)
        return mask_QL.masked_fill_(visible_QL.logical_not_(), float("-inf"))

    def _indices(self, numbers: Sequence[int]) -> Tokens:
        """Return numbers as a slice if they are consecutive, else as a tensor."""
        first = numbers[0]
        if all(number == first + i for i, number in enumerate(numbers)):
            return slice(first, first + len(numbers))
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _grow_scratch(self, num_slots: int) -> None:
        if num_slots <= self._scratch_SCKD.shape[0]:
            return
        # Not an inference tensor: a later step may run outside of inference mode.
        with torch.inference_mode(False):
            self._scratch_SCKD = torch.empty(
                (num_slots, *self._token_shape), dtype=self._dtype, device=self._device
            )


def group_by_length(rows: Sequence[int], lengths: Sequence[int], max_slots: int) -> list[list[int]]:
    """Return `rows` in groups of similar length, longest first, rows of equal length in order.

    lengths: positions to gather, indexed by row. A group padded to its longest has at most
    `max_slots` slots; a single row may have more.
    """
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda row: -lengths[row]):
        padding = longest - lengths[row]
        fits = groups and (len(groups[-1]) + 1) * longest <= max_slots
        if fits and padding <= max(MAX_PADDING, longest // 4):
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = lengths[row]
    return groups


def take(tensor: torch.Tensor, which: Tokens) -> torch.Tensor:
    """Return the entries with the indices `which`: a view if it is a slice, else a copy."""
    return tensor[which] if isinstance(which, slice) else tensor.index_select(0, which)


def visible(
    query_positions: torch.Tensor, key_positions: torch.Tensor, window: int
) -> torch.Tensor:
    """Return whether each query sees each key: bool, in the broadcast shape of the arguments.

    window: number of tokens that a token sees, including itself; 0 for no limit.
    """
    is_visible = key_positions <= query_positions
    return is_visible & (key_positions > query_positions - window) if window else is_visible
