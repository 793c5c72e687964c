"""Released blocks of requests, which are freed when no plan in flight uses them.

Each step frees a limited number, so that many long requests that end together do not delay a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dovetail.kv_cache.block_pool import BlockPool

MAX_BLOCKS_FREED = 262_144
"""Maximum references that are removed per step; this takes about 10 ms."""


class RetiringBlocks:
    """Frees each list of blocks when its last step has been executed."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._executed = -1
        self._by_step: dict[int, list[list[int]]] = {}
        self._due: deque[list[int]] = deque()
        self._num_left = MAX_BLOCKS_FREED

    def __iter__(self) -> Iterator[int]:
        """Yield every block that is not free yet, once per reference."""
        for lists in (*self._by_step.values(), self._due):
            for blocks in lists:
                yield from blocks

    @property
    def num_due(self) -> int:
        """Number of block lists that the next steps will free."""
        return len(self._due)

    def add(self, blocks: list[int], last_step: int) -> None:
        """Free `blocks` when step `last_step` has been executed, or now if it has been executed."""
        if last_step > self._executed:
            self._by_step.setdefault(last_step, []).append(blocks)
        elif self._num_left > 0 and not self._due:
            self._free(blocks)
        else:
            self._due.append(blocks)

    def executed(self, step_id: int) -> None:
        """Record that all steps up to `step_id` have been executed."""
        self._executed = step_id
        self._num_left = MAX_BLOCKS_FREED
        if self._by_step:
            for step in sorted(step for step in self._by_step if step <= step_id):
                self._due.extend(self._by_step.pop(step))
        while self._due and self._num_left > 0:
            self._free(self._due.popleft())

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks wait for a step that has been executed."""
        assert all(step > self._executed for step in self._by_step), (
            "blocks are not freed although their last step has been executed"
        )

    def _free(self, blocks: list[int]) -> None:
        self._num_left -= len(blocks)
        self._pool.free(blocks)
