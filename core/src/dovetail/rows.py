"""Batch slots, by which scheduler and worker identify running requests.

In code, a batch slot is called `row`. A request keeps its batch slot while it runs. A released
batch slot is reused after the last plan that contains it has been executed. Each reuse increments
its generation, so that outdated results are detected.
"""

from __future__ import annotations

from collections import deque


class RowAllocator:
    """Allocates batch slots 0 .. num_rows - 1, the lowest first until one is reused."""

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows={num_rows} must be at least 1")
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._generations = [0] * num_rows
        self._held = [False] * num_rows
        self._retiring: deque[tuple[int, int]] = deque()
        self._executed = -1

    @property
    def num_free(self) -> int:
        """Number of free batch slots."""
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        """Number of released batch slots that a step in flight still uses."""
        return len(self._retiring)

    def acquire(self) -> tuple[int, int]:
        """Return (row, generation). Raise LookupError if none is free."""
        if not self._free:
            raise LookupError(f"all {self.num_rows} rows (batch slots) are in use")
        row = self._free.pop()
        self._held[row] = True
        self._generations[row] += 1
        return row, self._generations[row]

    def release(self, row: int, *, last_step: int) -> None:
        """Release `row`. It becomes free when `last_step` is executed, the last step that uses it.

        Raises ValueError if the batch slot is not in use.
        """
        if not self._held[row]:
            raise ValueError(f"row {row} is not in use")
        self._held[row] = False
        if last_step <= self._executed:
            self._free.append(row)
        else:
            self._retiring.append((last_step, row))

    def executed(self, step_id: int) -> None:
        """Record that all plans up to `step_id` have been executed."""
        self._executed = step_id
        while self._retiring and self._retiring[0][0] <= step_id:
            self._free.append(self._retiring.popleft()[1])
