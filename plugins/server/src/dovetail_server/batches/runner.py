"""Executes the batches of a server: each API process executes some of them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from dovetail_server.batches.batch import Batch
from dovetail_server.batches.execution import BatchExecution
from dovetail_server.batches.free_batch_slots import FreeBatchSlots
from dovetail_server.protocol.errors import APIError
from dovetail_server.state import ServerState
from dovetail_server.storage.batches import BatchStore
from dovetail_server.storage.database import Database
from dovetail_server.storage.files import FileStore
from dovetail_server.transport.internal import InternalCalls

logger = logging.getLogger(__name__)

MAX_RUNNING = 4
"""Batches that one process executes at the same time."""

POLL_S = 5.0
"""Interval at which a process checks for batches of exited processes, and for old files."""


class BatchRunner:
    """Claims unfinished batches and executes them."""

    def __init__(
        self,
        state: ServerState,
        database: Database,
        stores: tuple[BatchStore, FileStore],
        calls: InternalCalls,
    ) -> None:
        self._state = state
        self._database = database
        self._batches, self._files = stores
        self._calls = calls
        self._batch_slots = FreeBatchSlots(state)
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start executing batches in the running event loop."""
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look for new batches immediately."""
        self._changed.set()

    async def stop(self) -> None:
        """Stop. Unfinished batches can be continued by another process, or after a restart."""
        tasks = [*self._running, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                if self._database.exists:
                    await self._files.clean()
                    await self._claim()
            except APIError as error:
                logger.warning("The batches cannot be read: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_S)
            self._changed.clear()

    async def _claim(self) -> None:
        while self._state.slot.is_loaded and len(self._running) < MAX_RUNNING:
            batch = await self._batches.claim()
            if batch is None:
                return
            task = asyncio.create_task(self._execute(batch))
            self._running.add(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.wake()

    async def _execute(self, batch: Batch) -> None:
        stores = (self._batches, self._files)
        execution = BatchExecution(
            batch,
            stores,
            self._calls,
            self._batch_slots,
            self._state.settings,
            self._batch_slots.max_lines,
        )
        try:
            await execution.run()
        except asyncio.CancelledError:
            with suppress(APIError):
                await asyncio.shield(self._batches.release(batch.id))
            raise
        except Exception:
            logger.exception("The execution of %s failed; the server will retry it.", batch.id)
            await asyncio.sleep(POLL_S)
            with suppress(APIError):
                await self._batches.release(batch.id)
            return
        counts = batch.counts
        logger.info(
            "%s: %s, %d of %d lines succeeded.",
            batch.id,
            batch.status,
            counts.completed,
            counts.total,
        )
