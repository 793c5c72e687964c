"""Limits how long tasks that do the same kind of work occupy one iteration of an event loop.

Without a limit, many short tasks that become ready together would run in one long iteration.
"""

from __future__ import annotations

import asyncio

from dovetail.clock import Clock


class EventLoopYield:
    """Allows `slice_ns` of work in each iteration of an event loop, for all tasks together."""

    def __init__(self, clock: Clock, slice_ns: int) -> None:
        self._clock = clock
        self._slice_ns = slice_ns
        self._start_ns: int | None = None

    async def wait(self) -> None:
        """Return immediately if this iteration has time left, otherwise in a later iteration."""
        while self._start_ns is not None and self._is_over(self._start_ns):
            await asyncio.sleep(0)
        if self._start_ns is None:
            self._start_ns = self._clock.now_ns()
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _is_over(self, start_ns: int) -> bool:
        return self._clock.now_ns() - start_ns > self._slice_ns

    def _end_turn(self) -> None:
        self._start_ns = None
