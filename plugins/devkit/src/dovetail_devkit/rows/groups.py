"""A `RowModel` for caches of several groups, with sliding windows and recurrent states.

Blocks before a window are removed from the tables, so a wrong read of such a block is detected. All
groups share the memory of a block, so a block belongs to one group at a time, and a write by one
group replaces the content of another group. The content of the blocks that a step may read is
compared with the expected content. This module does not depend on a scheduler.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import product
from typing import Any

from dovetail.interfaces.kv_cache import FullAttentionSpec, KVCacheConfig, StateSpec
from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.plan import SchedulerOutput
from dovetail_devkit.rows.model import RowModel
from dovetail_devkit.rows.state import MASK, RowState

SNAPSHOT_SPAN = 2
"""The window of a recurrent state: only the state before the next token is needed."""


def make_rows(
    limits: SchedulerLimits, kv_cache: KVCacheConfig, vocab_size: int, *, connected: bool
) -> RowModel:
    """Return a `RowModel` if the cache has one group without a window, else `GroupRows`.

    connected: whether a KV connector moves blocks; ignored for `GroupRows`.
    """
    spec = kv_cache.groups[0].spec
    if len(kv_cache.groups) == 1 and not (isinstance(spec, StateSpec) or _span(spec)):
        return RowModel(limits, kv_cache, vocab_size, connected=connected)
    return GroupRows(limits, kv_cache, vocab_size)


def _span(spec: Any) -> int:
    """Return how many tokens the next token attends to, including itself, or 0 for all tokens."""
    if isinstance(spec, StateSpec):
        return SNAPSHOT_SPAN if spec.snapshots else 0
    return spec.sliding_window if isinstance(spec, FullAttentionSpec) else 0


class GroupRows(RowModel):
    """Simulates the execution of plans, with one block table per KV-cache group.

    A number represents the key and value of a position.
    """

    def __init__(self, limits: SchedulerLimits, kv_cache: KVCacheConfig, vocab_size: int) -> None:
        super().__init__(limits, kv_cache, vocab_size)
        specs = [group.spec for group in kv_cache.groups]
        self._states: dict[tuple[int, int], int] = {}
        self._spans = [_span(spec) for spec in specs]
        self._state_specs = {g: s for g, s in enumerate(specs) if isinstance(s, StateSpec)}
        for group in self._state_specs:
            self._cached[group] = False  # `write` keeps no slots for the tokens of a state

    def execute(self, plan: SchedulerOutput) -> None:
        """Execute a plan as `RowModel` does, and check the content that each request reads."""
        self.drop_blocks()
        super().execute(plan)
        runs = self._step.runs if self._step else []
        for row, (start, end, _) in zip(plan.rows, runs, strict=True):
            for group, span in enumerate(self._spans):
                if self._cached[group]:
                    first = max(0, start - span + 1) if span else 0
                    self._check_read(group, self.rows[row], first, end)

    def drop_blocks(self) -> None:
        """Remove blocks that no later token needs from the tables. The blocks may be reused."""
        for state in self.rows.values():
            for group, span in enumerate(self._spans):
                end = self._first_needed(group, state.num_computed) if span else 0
                state.blocks[group][:end] = [0] * min(end, len(state.blocks[group]))

    def held_blocks(self, names: Container[str]) -> set[int]:
        """Return the blocks that rows of the requests `names` need."""
        self.drop_blocks()
        return super().held_blocks(names)

    def grow(self, group: int, row: int, block_ids: Sequence[int]) -> None:
        """Append blocks to a row's table, or 0 for blocks before the window."""
        self._require(row in self.rows, f"the plan gives blocks to row {row}, which has no request")
        table = self.rows[row].blocks[group]
        table.extend(block_ids)
        named = [block for block in table if block]
        there = all(0 < block < self._kv_cache.num_blocks for block in named)
        self._require(
            there, f"the plan gives row {row} blocks that do not exist: {list(block_ids)}"
        )
        self._require(
            len(set(named)) == len(named),
            f"the block table of row {row} has a block twice: {table}",
        )
        longest = (len(table) - 1) * self._block_sizes[group]
        self._require(
            longest < self.limits.max_model_len,
            f"row {row} has {len(table)} blocks, which is more than a request of max_model_len "
            f"tokens needs",
        )

    def write(self, row: int, start: int, count: int, samples: bool) -> None:
        """Fill the slots of some tokens, and advance the states."""
        super().write(row, start, count, samples)
        state = self.rows[row]
        self._overwrite(state, start, count)
        for group, spec in self._state_specs.items():
            size = self._block_sizes[group]
            last = state.blocks[group][(start - 1) // size if spec.snapshots else 0]
            valid = not start or self._states.get((group, last)) == state.contents[start - 1]
            self._require(
                valid,
                f"row {row} continues at position {start}, but its block does not contain the "
                f"state after position {start - 1}",
            )
            ends = {start + count, *range(start - start % size + size, start + count, size)}
            for end in sorted(ends):
                block = state.blocks[group][(end - 1) // size if spec.snapshots else 0]
                self._require(
                    block > 0, f"row {row} needs a block for its state after {end} tokens"
                )
                self._states[group, block] = state.contents[end - 1]

    def read(self, row: int, end: int) -> int:
        """Return the attention result of positions 0 to end - 1, without a check of the slots."""
        return sum(self.rows[row].contents[:end]) & MASK

    def shared_blocks(self) -> dict[tuple[int, int], list[int]]:
        """Return the rows that share each block, by (group, block)."""
        return {key: rows for key, rows in super().shared_blocks().items() if key[1]}

    def _overwrite(self, state: RowState, start: int, count: int) -> None:
        """Delete the content of other groups in the slots that are written."""
        groups = [group for group, keeps in enumerate(self._cached) if keeps]
        positions = range(start, min(start + count, len(state.tokens)))
        for group, other, position in product(groups, groups, positions):
            size = self._block_sizes[group]
            if other != group:
                block = state.blocks[group][position // size]
                self._slots.pop((other, block, position % size), None)

    def _check_sharing(self) -> None:
        owners: dict[int, int] = {}
        for state in self.rows.values():
            for group, table in enumerate(state.blocks):
                for block in table:
                    owner = owners.setdefault(block, group) if block else group
                    self._require(
                        owner == group,
                        f"the KV-cache groups {owner} and {group} both have block {block}, but "
                        f"they share its memory; use separate blocks for each group",
                    )
        super()._check_sharing()

    def _first_needed(self, group: int, num_computed: int) -> int:
        first = max(0, num_computed - self._spans[group] + 1)
        return first // self._block_sizes[group]

    def _check_read(self, group: int, state: RowState, first: int, end: int) -> None:
        size, table, slots = self._block_sizes[group], state.blocks[group], self._slots
        for position in range(first, end):
            content = slots.get((group, table[position // size], position % size))
            if content != state.contents[position]:
                raise AssertionError(
                    f"{state.request.request_id} reads position {position} of group {group} from "
                    f"block {table[position // size]}, which contains other data"
                )
