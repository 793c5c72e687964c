"""The result of a look-up in the prefix cache. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of a request that every group can resume.

    num_tokens: length of the hit in tokens, in whole blocks. blocks: one list per group, 0 for
    positions that the group does not need. Valid until blocks are allocated or taken.
    missing: (group, position) of blocks that the KV connector can load; they are 0 in `blocks`.
    """

    num_tokens: int
    blocks: Sequence[Sequence[int]]
    missing: tuple[tuple[int, int], ...] = ()
