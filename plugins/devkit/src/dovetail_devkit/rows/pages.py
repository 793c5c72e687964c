"""The cache of a fake worker as pages of memory, and an unreliable KV connector for it.

`SlotPages` has the tensor operations that `FakeWorkerSide` uses on the argument of
`KVWorkerSide.register`. `FlakyWorkerSide` loses some stored blocks, so that loads fail.
"""

from __future__ import annotations

from typing import Any

from dovetail_devkit.fakes.kv_connector import FakeWorkerSide

Slots = dict[tuple[int, int, int], int]
"""The number in each slot, by (group, block, offset)."""


class _Page:
    """The content of one block."""

    def __init__(self, slots: Slots, block: int) -> None:
        self._slots = slots
        self._block = block

    def clone(self) -> dict[tuple[int, int], int]:
        """Return the content of the block."""
        return {(g, o): number for (g, b, o), number in self._slots.items() if b == self._block}

    def copy_(self, page: dict[tuple[int, int], int]) -> None:
        """Set the block's content to a value from `clone`."""
        for group, offset in self.clone():
            del self._slots[group, self._block, offset]
        for (group, offset), number in page.items():
            self._slots[group, self._block, offset] = number


class SlotPages:
    """All blocks of a cache, by block id. The caller owns the slots."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def __getitem__(self, block: int) -> _Page:
        return _Page(self._slots, block)


class FlakyWorkerSide(FakeWorkerSide):
    """Loses some of the stored blocks.

    loses_one_in: one of this many blocks is lost; 0 for none.
    spoilt: blocks of failed loads, whose content is invalid.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loses_one_in = 4
        self.spoilt: set[int] = set()
        self._num_requested = 0

    def load(self, order: dict[str, Any]) -> None:
        """Lose some of the stored blocks, then write the remaining blocks to the cache."""
        for key in order["keys"]:
            self._num_requested += 1
            if self.loses_one_in and not self._num_requested % self.loses_one_in:
                self.kept.pop(key, None)
        super().load(order)

    def end(self, order: dict[str, Any], missing: list[int]) -> None:
        """Report a transfer that has ended."""
        self.spoilt.update(missing)
        super().end(order, missing)
