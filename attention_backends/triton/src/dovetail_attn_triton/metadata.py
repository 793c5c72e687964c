"""Builds the metadata of a step: how the kernels divide the work among Triton programs.

The division depends on lengths that the host knows. The tensors of the step are passed on
unchanged, without a copy or a wait. All memory is allocated before the first step. The builder
cannot split the work, because the splits depend on a layer's heads. The first layer of a step
computes them for all layers of the same shape.

Shape legend: R requests, W items of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionMetadataBuilder,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_triton.options import TritonAttentionOptions
from dovetail_attn_triton.tiles import AttentionShape, Tile
from dovetail_attn_triton.work_kernels import list_work

# Programs per processor: few enough to amortize the start of each program, and enough to keep the
# processors busy until the end.
PROGRAMS_PER_PROCESSOR = 6

# Programs per processor if few rows are split into equal parts, all of which run at the same time:
# more programs would wait for the first ones.
PROGRAMS_OF_FEW_ROWS = 2

# A step has few rows if it has at most this many programs per processor without splits.
FEW_PROGRAMS = 0.25

# Splits with fewer positions are not worth combining.
LEAST_SPAN = 64

# Runs or tiles that a program of `list_work` processes together.
CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One kernel launch for items of one tile size.

    work_W2: int32 pairs (request, first token), or None if each request is an item.
    num_items: W. item_tokens: maximum number of tokens per item in this step. num_splits: maximum
    number of splits per item. least_span: minimum number of positions of a split.
    """

    tile: Tile
    work_W2: torch.Tensor | None
    num_items: int
    item_tokens: int
    num_splits: int
    least_span: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Memory that all steps of a group share, and the number of multiprocessors.

    parts: float32 results of splits, unused between two layers. max_work: maximum number of pairs
    in a list. num_processors: the device's number of multiprocessors. lists: work lists, by layer
    shape.
    """

    parts: torch.Tensor
    max_splits: int
    max_work: int
    num_processors: int
    lists: dict[AttentionShape, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def lists_for(self, shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the lists of short and of long items. The first call allocates it."""
        result = self.lists.get(shape)
        if result is None:
            # Not an inference tensor: a later step may run outside of inference mode.
            with torch.inference_mode(False):
                size = (2, self.max_work, 2)
                both_2W2 = torch.empty(size, dtype=torch.int32, device=self.parts.device)
            result = self.lists[shape] = (both_2W2[0], both_2W2[1])
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonAttentionMetadata:
    """A step, and its launches by layer shape.

    for_graph: whether the launches may depend only on the number of requests, which have one token.
    """

    batch: AttentionBatch
    spec: FullAttentionSpec
    workspace: Workspace
    for_graph: bool = False
    made: dict[AttentionShape, tuple[Pass, ...]] = field(default_factory=dict)

    def passes(self, shape: AttentionShape) -> tuple[Pass, ...]:
        """Return the launches of a layer. In each step, a shape's first call creates its list."""
        result = self.made.get(shape)
        if result is None:
            make = self._make_for_graph if self.for_graph else self._make
            result = self.made[shape] = make(shape)
        return result

    def _make_for_graph(self, shape: AttentionShape) -> tuple[Pass, ...]:
        """Return a launch with enough splits for the longest requests.

        Short requests use few of them.
        """
        num_items = self.batch.num_requests
        num_programs = self._num_programs(num_items * shape.num_kv_heads)
        expected = -(-num_programs // (num_items * shape.num_kv_heads))
        useful = -(-max(self._seen_lens()) // LEAST_SPAN)
        return (
            Pass(
                tile=shape.short,
                work_W2=None,
                num_items=num_items,
                item_tokens=1,
                num_splits=max(1, min(expected, useful, self._max_splits(shape, num_items))),
                least_span=LEAST_SPAN,
            ),
        )

    def _num_programs(self, num_unsplit: int) -> int:
        """Return the number of programs of a launch. num_unsplit: the number without splits."""
        num_processors = self.workspace.num_processors
        is_few = num_unsplit <= FEW_PROGRAMS * num_processors
        return num_processors * (PROGRAMS_OF_FEW_ROWS if is_few else PROGRAMS_PER_PROCESSOR)

    def _max_splits(self, shape: AttentionShape, num_rows: int) -> int:
        """Return how many splits of `num_rows` tokens fit into the workspace."""
        row_floats = shape.num_heads * (shape.head_size + 1)
        room = self.workspace.parts.numel() // max(1, num_rows * row_floats)
        return min(room, self.workspace.max_splits)

    def _make(self, shape: AttentionShape) -> tuple[Pass, ...]:
        batch = self.batch
        num_short = shape.tokens_of(shape.short)
        num_long = shape.tokens_of(shape.long)
        seen_lens = self._seen_lens()
        pairs = list(zip(batch.query_lens, seen_lens, strict=True))
        long = [(-(-query // num_long), seen) for query, seen in pairs if query > num_short]
        if not long:
            lengths = [seen for query, seen in pairs if query]
            most = max(batch.query_lens, default=0)
            return (self._pass(shape, shape.short, None, (batch.num_requests, most), lengths),)
        short = [(query, seen) for query, seen in pairs if 0 < query <= num_short]
        short_W2, long_W2 = self.workspace.lists_for(shape)
        list_work[(batch.num_requests,)](
            batch.query_start_R1, short_W2, long_W2, SHORT=num_short, TILE=num_long, CHUNK=CHUNK
        )
        num_items = sum(count for count, _ in long)
        lengths = [seen for count, seen in long for _ in range(count)]
        matches = [self._pass(shape, shape.long, long_W2, (num_items, num_long), lengths)]
        if short:
            items = (len(short), max(query for query, _ in short))
            lengths = [seen for _, seen in short]
            matches.append(self._pass(shape, shape.short, short_W2, items, lengths))
        return tuple(matches)

    def _seen_lens(self) -> Sequence[int]:
        """Return, for each request, the number of positions that one or more of its tokens see."""
        batch, window = self.batch, self.spec.sliding_window
        if not window:
            return batch.seq_lens
        lens = zip(batch.query_lens, batch.seq_lens, strict=True)
        return [min(seq_len, query_len + window - 1) for query_len, seq_len in lens]

    def _pass(
        self,
        shape: AttentionShape,
        tile: Tile,
        work_W2: torch.Tensor | None,
        items: tuple[int, int],
        lengths: Sequence[int],
    ) -> Pass:
        num_items, item_tokens = items
        num_splits, least_span = plan_splits(
            lengths,
            num_heads=shape.num_kv_heads,
            tile=tile.positions,
            num_programs=self._num_programs(num_items * shape.num_kv_heads),
            max_splits=self._max_splits(shape, num_items * item_tokens),
        )
        return Pass(
            tile=tile,
            work_W2=work_W2,
            num_items=num_items,
            item_tokens=item_tokens,
            num_splits=num_splits,
            least_span=least_span,
        )


def plan_splits(
    lengths: Sequence[int], *, num_heads: int, tile: int, num_programs: int, max_splits: int
) -> tuple[int, int]:
    """Return the maximum number of splits of an item, and the minimum positions of a split.

    lengths: number of positions of each item. An item has one program for each of `num_heads`. The
    minimum is the average number of positions per program (`num_programs`), so that long items are
    split and short items are not. It is a multiple of `tile`, and at least `LEAST_SPAN`.
    """
    share = sum(lengths) * num_heads // num_programs
    span = max(LEAST_SPAN, -(-share // tile) * tile)
    num_splits = -(-max(lengths, default=1) // span)
    return max(1, min(num_splits, max_splits)), span


def _parts(context: AttentionGroupContext, num_bytes: int) -> torch.Tensor:
    """Return float32 memory for the results of splits: the worker's workspace, or new memory."""
    if context.workspace is None:
        return torch.empty(num_bytes >> 2, dtype=torch.float32, device=context.device)
    return context.workspace(num_bytes)[:num_bytes].view(torch.float32)


class TritonMetadataBuilder(AttentionMetadataBuilder):
    """Returns the metadata of each step, with the memory that all steps share."""

    def __init__(self, context: AttentionGroupContext, num_processors: int) -> None:
        options = TritonAttentionOptions(**context.options)
        self._spec = context.spec
        self._workspace = Workspace(
            parts=_parts(context, options.workspace_mib << 20),
            max_splits=options.max_splits,
            max_work=context.max_num_batched_tokens + context.max_num_seqs,
            num_processors=num_processors,
        )

    def build(self, batch: AttentionBatch) -> TritonAttentionMetadata:
        """Return this step's metadata. Only reads `batch`. Does not wait for a device."""
        return TritonAttentionMetadata(batch=batch, spec=self._spec, workspace=self._workspace)

    def build_for_graph(self, batch: AttentionBatch) -> TritonAttentionMetadata:
        """Return the metadata of captured decodes, with one token per request."""
        return TritonAttentionMetadata(
            batch=batch, spec=self._spec, workspace=self._workspace, for_graph=True
        )

    def update_for_replay(self, metadata: TritonAttentionMetadata, batch: AttentionBatch) -> None:
        """Do nothing: the kernels read all lengths on the device."""
