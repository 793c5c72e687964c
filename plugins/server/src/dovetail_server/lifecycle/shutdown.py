"""Graceful shutdown: after the first signal, running requests finish; the second ends them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable

from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.protocol.errors import unavailable
from dovetail_server.transport.application import Application

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.02
_LAST_WORDS_S = 2.0


class Drain:
    """Ends a server. requested: set by the first signal; forced: by the second."""

    def __init__(self, slot: EngineSlot, timeout_s: float) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        self._slot = slot
        self._timeout_s = timeout_s

    def install(self) -> None:
        """Handle the signals of this process."""
        loop = asyncio.get_running_loop()
        for one in SIGNALS:
            loop.add_signal_handler(one, self.handle_signal)

    def handle_signal(self) -> None:
        """Start the graceful shutdown; the second call ends it."""
        if self.requested.is_set():
            self.forced.set()
            return
        self._slot.draining = True
        self.requested.set()

    async def finish(self, applications: Iterable[Application]) -> bool:
        """Wait for the running requests; return whether all of them ended by themselves.

        After the time limit, or a second signal, requests that still run end with an error.
        """
        running = list(applications)
        total = sum(len(one.exchanges) for one in running)
        if total:
            logger.info("Shutting down: waiting for %d running requests.", total)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while any(one.exchanges for one in running):
            late = asyncio.get_running_loop().time() >= deadline
            if late or self.forced.is_set():
                return await self._end(running)
            await asyncio.sleep(_POLL_S)
        return True

    async def _end(self, running: list[Application]) -> bool:
        error = unavailable("The server is shutting down.", code="shutting_down")
        exchanges = [one for application in running for one in application.exchanges]
        logger.warning("%d requests did not finish and are ended.", len(exchanges))
        for exchange in exchanges:
            exchange.interrupt(error)
        deadline = asyncio.get_running_loop().time() + _LAST_WORDS_S
        while any(one.exchanges for one in running):
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
        return False
