"""Where one reader waits for the outputs of its request.

Nothing is queued here. A stream knows only that there is news; the output is made when the reader
takes it, so that a reader who comes late gets all that is new at once. What waits for a slow
reader is the text itself and no more, and it slows nobody down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy

from dovetail.errors import DovetailError, UserError
from dovetail.outputs import RequestOutput


class OutputStream:
    """The outputs of one request, for one reader, in one event loop. ended: the last one is out."""

    __slots__ = ("_error", "_loop", "_news", "_timers", "_waiter", "ended", "make_output")

    def __init__(self, make_output: Callable[[], RequestOutput]) -> None:
        """make_output: returns what there is to say now; asked only when there is news."""
        self.ended = False
        self.make_output = make_output
        self._loop = asyncio.get_running_loop()
        self._news = False
        self._error: DovetailError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def notify(self) -> None:
        """Say that there is news."""
        self._news = True
        self._wake()

    def fail(self, error: DovetailError) -> None:
        """Let the reader have `error`, after what there is already."""
        self._error = error
        self._wake()

    def watch(self, timer: asyncio.TimerHandle) -> None:
        """Keep a timer that is to be cancelled when the stream is closed."""
        self._timers.append(timer)

    def close(self) -> None:
        """Cancel the timers. May be called twice."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    async def next(self) -> RequestOutput:
        """Return the next output; wait for it. Raise the error that the stream failed with."""
        while not self._news:
            if self._error is not None:
                raise copy(self._error)  # others raise it too; each has its own traceback
            if asyncio.get_running_loop() is not self._loop:
                raise UserError("a stream is read in the event loop in which it began.")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._news = False
        output = self.make_output()
        self.ended = output.finished
        return output

    def _wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if not self._loop.is_closed():  # else its reader is gone as well
            self._waiter.set_result(None)
