"""What the prefix cache has of a request: the answer to a look-up. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix of a request that every group can resume.

    num_tokens: how long it is; whole blocks. blocks: one list a group, a block for each of them, 0
    where the group needs none. Valid until blocks are handed out or taken.
    missing: (group, position) of blocks whose contents are not here, but to be had from elsewhere;
    they stand as 0 in `blocks`.
    """

    num_tokens: int
    blocks: Sequence[Sequence[int]]
    missing: tuple[tuple[int, int], ...] = ()
