"""Reads a server in intervals and shows each result, even while the server restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from dovetail.clock import Clock
from dovetail_client_tools.engine_steps.reader import Problem, ServerNames, StepsError, StepsReader
from dovetail_client_tools.top.engine_view import NS, EngineView
from dovetail_client_tools.top.frame import Picture

MIN_PAUSE_S = 0.05


class TopLoop:
    """One run of `dovetail top`. stop: set it to end the run."""

    def __init__(self, reader: StepsReader, interval_s: float, clock: Clock) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._clock = clock
        self._view = EngineView()
        self._names: ServerNames | None = None
        self._problem = ""
        self.stop = asyncio.Event()

    async def once(self) -> Picture:
        """Return a picture with the rates of one interval."""
        await self._read()
        await asyncio.sleep(self._interval_s)
        await self._read()
        return self._picture()

    async def run(self, show: Callable[[Picture], None]) -> None:
        """Show a picture in each interval until `stop` is set.

        Raises StepsError if the first attempt fails for a reason other than a busy server. Later
        errors are shown, and the next attempt follows.
        """
        while not self.stop.is_set():
            begin_ns = self._clock.now_ns()
            try:
                await self._read()
                self._problem = ""
            except StepsError as error:
                if self._names is None and error.kind is not Problem.BUSY:
                    raise
                self._problem = str(error)
            show(self._picture())
            passed_s = (self._clock.now_ns() - begin_ns) / NS
            with suppress(TimeoutError):
                pause_s = max(MIN_PAUSE_S, self._interval_s - passed_s)
                await asyncio.wait_for(self.stop.wait(), pause_s)

    async def _read(self) -> None:
        if self._names is None or self._problem:
            self._names = await self._reader.names()
        self._view.add(await self._reader.read(self._view.after))

    def _picture(self) -> Picture:
        names = self._names or ServerNames(self._reader.url, "")
        now = time.strftime("%H:%M:%S")
        return Picture(names=names, view=self._view, problem=self._problem, time=now)
