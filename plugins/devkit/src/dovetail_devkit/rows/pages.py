"""The cache of a made-up worker as pages of memory, and a connector that moves them and errs.

`SlotPages` looks to a KV connector's worker side like the tensor that `KVWorkerSide.register` is
given, as far as `FakeWorkerSide` uses one. `FlakyWorkerSide` loses some of what it has stored, so
that loads fail.
"""

from __future__ import annotations

from typing import Any

from dovetail_devkit.fakes.kv_connector import FakeWorkerSide

Slots = dict[tuple[int, int, int], int]
"""(group, block, offset) to the number that stands there."""


class _Page:
    """One block of all groups."""

    def __init__(self, slots: Slots, block: int) -> None:
        self._slots = slots
        self._block = block

    def clone(self) -> dict[tuple[int, int], int]:
        """Return what stands in the block."""
        return {(g, o): number for (g, b, o), number in self._slots.items() if b == self._block}

    def copy_(self, page: dict[tuple[int, int], int]) -> None:
        """Let the block hold what `clone` has returned."""
        for group, offset in self.clone():
            del self._slots[group, self._block, offset]
        for (group, offset), number in page.items():
            self._slots[group, self._block, offset] = number


class SlotPages:
    """Every block of a cache, by its number. The slots stay their owner's."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def __getitem__(self, block: int) -> _Page:
        return _Page(self._slots, block)


class FlakyWorkerSide(FakeWorkerSide):
    """Loses some of the blocks that are asked of it.

    loses_one_in: how many; 0 for none. spoilt: blocks of loads that have failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loses_one_in = 4
        self.spoilt: set[int] = set()
        self._num_asked = 0

    def load(self, order: dict[str, Any]) -> None:
        """Write what is kept, after losing some of it."""
        for key in order["keys"]:
            self._num_asked += 1
            if self.loses_one_in and not self._num_asked % self.loses_one_in:
                self.kept.pop(key, None)
        super().load(order)

    def end(self, order: dict[str, Any], missing: list[int]) -> None:
        """Tell of a transfer that has ended."""
        self.spoilt.update(missing)
        super().end(order, missing)
