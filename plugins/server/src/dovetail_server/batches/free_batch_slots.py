"""Lets batch lines start only while the engine has free batch slots that no client needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dovetail_server.state import ServerState

_POLL_S = 0.02


class FreeBatchSlots:
    """Limits the batch lines of this process, over all batches.

    A line starts only while fewer requests are running than the engine has batch slots
    (`max_num_seqs`). Policies that use priorities also prefer the requests of clients.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._num_lines = 0
        self._turns: asyncio.Lock | None = None

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for a free batch slot, first come, first served. The context holds the slot."""
        if self._turns is None:
            self._turns = asyncio.Lock()
        async with self._turns:
            while not self._is_free():
                await asyncio.sleep(_POLL_S)
            self._num_lines += 1
        try:
            yield
        finally:
            self._num_lines -= 1

    @property
    def max_lines(self) -> int:
        """The maximum number of lines that this process may execute at the same time."""
        settings = self._state.settings
        maximum = settings.batch_concurrency or max(1, self._num_slots // 2)
        return -(-maximum // settings.api_processes)

    @property
    def _num_slots(self) -> int:
        return self._state.slot.llm.config.scheduler.max_num_seqs

    def _is_free(self) -> bool:
        state = self._state
        if not state.slot.is_loaded or state.slot.reported_problem:
            return False
        share = -(-self._num_slots // state.settings.api_processes)
        num_running = max(state.admission.num_running, self._num_lines)
        return self._num_lines < self.max_lines and num_running < share
