"""Graceful shutdown: running requests finish after the first signal. A second signal ends them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection

from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.protocol.errors import unavailable
from dovetail_server.transport.exchange import Exchange

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.02
_LAST_WORDS_S = 2.0


class Drain:
    """Shuts down a server gracefully. requested: set by the first signal; forced: by the second."""

    def __init__(self, slot: EngineSlot, timeout_s: float) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        self._slot = slot
        self._timeout_s = timeout_s

    def install(self) -> None:
        """Handle the signals of this process."""
        loop = asyncio.get_running_loop()
        for item in SIGNALS:
            loop.add_signal_handler(item, self.handle_signal)

    def handle_signal(self) -> None:
        """Start the graceful shutdown. A second call aborts the running requests."""
        if self.requested.is_set():
            self.forced.set()
            return
        self._slot.draining = True
        self.requested.set()

    async def finish(self, exchanges: Collection[Exchange]) -> bool:
        """Wait for the running requests. Return whether none of them was aborted.

        After the time limit, or a second signal, requests that still run end with an error.
        exchanges: the running requests; a request that ends is removed from it.
        """
        if exchanges:
            logger.info("Shutting down: waiting for %d running requests.", len(exchanges))
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while exchanges:
            late = asyncio.get_running_loop().time() >= deadline
            if late or self.forced.is_set():
                return await self._end(exchanges)
            await asyncio.sleep(_POLL_S)
        return True

    async def _end(self, exchanges: Collection[Exchange]) -> bool:
        error = unavailable("The server is shutting down.", code="shutting_down")
        logger.warning("%d requests did not finish and are aborted.", len(exchanges))
        for exchange in list(exchanges):
            exchange.interrupt(error)
        deadline = asyncio.get_running_loop().time() + _LAST_WORDS_S
        while exchanges:
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
        return False
