"""What a group of layers needs of a request's past: all of it, a window, or the latest state.

A group's block table has one block for each `block_size` tokens, or, for a state that is kept
once, a single one. Its kind says from which position on the next token needs them, and which
prefixes it could resume from cached blocks. Knows neither pool nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dovetail.interfaces.kv_cache import FullAttentionSpec, KVCacheSpec, StateSpec


class CacheKind(Protocol):
    """One group's rules.

    positional: whether its table has a block for each `block_size` tokens, else one in all.
    sheds: whether blocks are given back while the request runs.
    span: tokens of the past that the next token needs, itself included; 0 for all of them.
    """

    positional: bool
    sheds: bool
    span: int

    def first_needed(self, num_tokens: int) -> int:
        """Return the first table position that the token after `num_tokens` computed ones needs."""

    def resumable(self, cached: Sequence[int], num_blocks: int) -> int:
        """Return the longest prefix, at most `num_blocks` blocks, that can be resumed.

        cached: the block that holds each position's content, 0 where none does.
        """


class FullKind:
    """Every token sees all before it."""

    positional = True
    sheds = False
    span = 0

    def first_needed(self, num_tokens: int) -> int:
        """Return 0: nothing of the past may go."""
        return 0

    def resumable(self, cached: Sequence[int], num_blocks: int) -> int:
        """Return how many blocks are cached without a gap, from the first."""
        for position in range(num_blocks):
            if not cached[position]:
                return position
        return num_blocks


class WindowKind:
    """Every token sees `span` tokens, itself included; what lies further back may go.

    A state with snapshots is a window of two tokens: what follows needs the block before it.
    """

    positional = True
    sheds = True

    def __init__(self, block_size: int, span: int) -> None:
        self._block_size = block_size
        self.span = span

    def first_needed(self, num_tokens: int) -> int:
        """Return the position of the oldest token that the next one sees."""
        return max(0, num_tokens - self.span + 1) // self._block_size

    def resumable(self, cached: Sequence[int], num_blocks: int) -> int:
        """Return the longest prefix whose last blocks, as far as the window goes, are cached."""
        end = position = num_blocks  # the prefix under trial; cached[position:end] has no gap
        while position > self.first_needed(end * self._block_size):
            position -= 1
            if not cached[position]:
                end = position
        return end


class SingleKind:
    """One state a request, overwritten as it goes: no prefix can be resumed."""

    positional = False
    sheds = False
    span = 1

    def first_needed(self, num_tokens: int) -> int:
        """Return 0: the one block stays."""
        return 0

    def resumable(self, cached: Sequence[int], num_blocks: int) -> int:
        """Return 0: the state of an earlier time is gone."""
        return 0


def kind_of(spec: KVCacheSpec) -> CacheKind:
    """Return the rules of a group that keeps `spec`."""
    if isinstance(spec, StateSpec):
        return WindowKind(spec.block_size, 2) if spec.snapshots else SingleKind()
    if isinstance(spec, FullAttentionSpec) and spec.sliding_window:
        return WindowKind(spec.block_size, spec.sliding_window)
    return FullKind()
