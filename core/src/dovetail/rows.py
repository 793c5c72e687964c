"""Rows: the small integers by which scheduler and worker name the requests that run.

A request has its row for life. A row given up is reused only when the last plan that names it has
been executed, and each reuse raises its generation, so that a stale result can be told.
"""

from __future__ import annotations

from collections import deque


class RowAllocator:
    """Hands out rows 0 .. num_rows - 1; lowest first while none was ever returned."""

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
        """Rows that `acquire` could hand out now."""
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        """Rows given back that a step which is out still names."""
        return len(self._retiring)

    def acquire(self) -> tuple[int, int]:
        """Return (row, generation); raise LookupError if none is free."""
        if not self._free:
            raise LookupError(f"all {self.num_rows} rows are taken")
        row = self._free.pop()
        self._held[row] = True
        self._generations[row] += 1
        return row, self._generations[row]

    def release(self, row: int, *, last_step: int) -> None:
        """Give `row` back; it is free once step `last_step`, the last that names it, is executed.

        Raises ValueError if the row is not held.
        """
        if not self._held[row]:
            raise ValueError(f"row {row} is not held")
        self._held[row] = False
        if last_step <= self._executed:
            self._free.append(row)
        else:
            self._retiring.append((last_step, row))

    def executed(self, step_id: int) -> None:
        """Say that all plans up to `step_id` have been executed."""
        self._executed = step_id
        while self._retiring and self._retiring[0][0] <= step_id:
            self._free.append(self._retiring.popleft()[1])
