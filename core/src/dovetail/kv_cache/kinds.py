"""The rules of KV-cache groups: which past tokens a group needs.

A group needs all past tokens, the tokens of a window or a chunk, or only a state. The block table
of a group has one block for each `block_size` tokens or, for a state without snapshots, a single
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.interfaces.kv_cache import FullAttentionSpec, KVCacheSpec, StateSpec

SNAPSHOT_SPAN = 2
"""A state with snapshots is treated as a window of two tokens: a token needs the block before
it."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    """The rules of one group.

    block_size: tokens per block. span: number of last tokens that the next token needs, itself
    included; 0 for all. positional: whether the table has a block for each `block_size` tokens;
    otherwise it has one block, and no prefix can be resumed. is_chunked: whether the next token
    needs the last tokens only back to the last multiple of `span`.
    """

    block_size: int
    span: int = 0
    positional: bool = True
    is_chunked: bool = False

    @property
    def sheds(self) -> bool:
        """Whether the group frees blocks of a request while the request runs."""
        return self.positional and self.span > 0

    def first_needed(self, num_tokens: int) -> int:
        """Return the first table position that the next token needs after `num_tokens` tokens."""
        if not self.sheds:
            return 0
        if self.is_chunked:
            return num_tokens // self.span * self.span // self.block_size
        return max(0, num_tokens - self.span + 1) // self.block_size

    def num_positions(self, num_tokens: int) -> int:
        """Return the length of the block table for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size) if self.positional else 1

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of `num_tokens` holds at a time.

        max_step_tokens: maximum tokens of a sequence per step; 0 if unknown.
        """
        num_positions = self.num_positions(num_tokens)
        if not self.sheds or not max_step_tokens:
            return num_positions
        # The first token of the window and the last of the step may be anywhere in their blocks.
        return min(num_positions, -(-(self.span - 1 + max_step_tokens) // self.block_size) + 1)

    def resumable(self, cached: Sequence[int], num_blocks: int) -> int:
        """Return the longest prefix, at most `num_blocks` blocks, that can be resumed.

        cached: the cached block of each position, 0 for none.
        """
        if not self.positional:
            return 0
        if not self.span:
            return next((index for index in range(num_blocks) if not cached[index]), num_blocks)
        end = position = (
            num_blocks  # `end` is the candidate prefix; cached[position:end] has no gap
        )
        while position > self.first_needed(end * self.block_size):
            position -= 1
            if not cached[position]:
                end = position
        return end


def kind_of(spec: KVCacheSpec) -> CacheKind:
    """Return the rules of a KV-cache group whose layers have this spec."""
    if isinstance(spec, StateSpec):
        if spec.snapshots:
            return CacheKind(spec.block_size, SNAPSHOT_SPAN)
        return CacheKind(spec.block_size, positional=False)
    if not isinstance(spec, FullAttentionSpec):
        return CacheKind(spec.block_size)
    if spec.chunk_size:
        return CacheKind(spec.block_size, spec.chunk_size, is_chunked=True)
    return CacheKind(spec.block_size, spec.sliding_window)


def capacity(tables: Sequence[Sequence[int]], kinds: Sequence[CacheKind], num_tokens: int) -> int:
    """Return the number of tokens that block tables, one per group, can hold.

    If no table is positional, the tables hold any number of tokens, and the result is `num_tokens`
    in whole blocks.
    """
    pairs = zip(tables, kinds, strict=True)
    sizes = [len(table) * kind.block_size for table, kind in pairs if kind.positional]
    size = kinds[0].block_size
    return min(sizes) if sizes else -(-num_tokens // size) * size
