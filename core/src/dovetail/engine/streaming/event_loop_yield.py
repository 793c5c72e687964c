"""Shares the turns of an event loop: many tasks do a little work of one kind in each turn.

Without it, tasks that become ready together, each with little to do, fill one turn of the loop.
"""

from __future__ import annotations

import asyncio

from dovetail.clock import Clock


class EventLoopYield:
    """Work of one kind in one event loop, `slice_ns` of it in each turn, whoever does it."""

    def __init__(self, clock: Clock, slice_ns: int) -> None:
        self._clock = clock
        self._slice_ns = slice_ns
        self._start_ns: int | None = None

    async def wait(self) -> None:
        """Return at once if this turn has time left, else in a later turn."""
        while self._start_ns is not None and self._is_over(self._start_ns):
            await asyncio.sleep(0)
        if self._start_ns is None:
            self._start_ns = self._clock.now_ns()
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _is_over(self, start_ns: int) -> bool:
        return self._clock.now_ns() - start_ns > self._slice_ns

    def _end_turn(self) -> None:
        self._start_ns = None
