"""The stream of one request, in which its reader waits for outputs.

Outputs are not queued. The stream records only that there are new results, and creates the
output when the reader takes it. A slow reader gets all new results in one output, delays no other
request, and needs no memory except for the text itself.

A reader can have a sink, which takes outputs without a switch to the reader's task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from typing import Protocol

from dovetail.errors import DovetailError, UserError
from dovetail.outputs import RequestOutput
from dovetail.plugins.containment import describe_failure


class OutputSink(Protocol):
    """Takes outputs of one request, in its event loop. See `AsyncLLM.generate_to`."""

    def is_ready(self) -> bool:
        """Return whether `take` can be called now. Otherwise the reader gets the next output."""

    def take(self, output: RequestOutput) -> None:
        """Process an output that is not the last one. Must not block."""


class OutputStream:
    """The outputs of a request, for one reader in one event loop.

    ended: whether the last output was read.
    """

    __slots__ = ("_error", "_loop", "_news", "_sink", "_timers", "_waiter", "ended", "make_output")

    def __init__(
        self, make_output: Callable[[], RequestOutput], sink: OutputSink | None = None
    ) -> None:
        """Create a stream.

        make_output: returns the next output; called only if there are new results.
        """
        self.ended = False
        self.make_output = make_output
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._news = False
        self._error: DovetailError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def notify(self) -> None:
        """Notify the reader that there are new results."""
        self._news = True
        self._wake()

    def offer(self) -> None:
        """Pass new results that are not final to the sink, or notify the reader.

        The sink gets them only if it is ready and the reader has processed all earlier results.
        """
        sink, waiter = self._sink, self._waiter
        if sink is None or waiter is None or waiter.done():
            self.notify()
            return
        try:
            if sink.is_ready():
                sink.take(self.make_output())
            else:
                self.notify()
        except Exception as error:
            self.fail(UserError(f"the sink of the request failed: {describe_failure(error)}."))

    def fail(self, error: DovetailError) -> None:
        """Raise `error` in the reader, after the outputs that have arrived."""
        self._error = error
        self._wake()

    def watch(self, timer: asyncio.TimerHandle) -> None:
        """Store a timer, which is cancelled when the stream is closed."""
        self._timers.append(timer)

    def close(self) -> None:
        """Cancel the timers. May be called twice."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    async def next(self) -> RequestOutput:
        """Wait for the next output and return it. Raise the error given to `fail`."""
        while not self._news:
            if self._error is not None:
                raise copy(self._error)  # other readers raise it too; each has its own traceback
            if asyncio.get_running_loop() is not self._loop:
                raise UserError("A stream must be read in the event loop in which it was created.")
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
        if not self._loop.is_closed():  # a closed loop has no readers
            self._waiter.set_result(None)
