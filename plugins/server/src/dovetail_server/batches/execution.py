"""Executes one batch: from the lines of its input file to its output and error files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from dovetail_server.batches.batch import Batch, BatchFailure
from dovetail_server.batches.free_batch_slots import FreeBatchSlots
from dovetail_server.batches.line_reader import InputLine, read_lines
from dovetail_server.batches.lines import LineError, LineExecutor, error_record
from dovetail_server.batches.record_files import RecordFiles, open_input, record_id
from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings
from dovetail_server.storage.batches import BatchStore
from dovetail_server.storage.files import WRITING, FileStore
from dovetail_server.transport.internal import InternalCalls

SAVE_S = 0.5
"""Interval at which the progress is stored, and cancellation and expiry are checked."""


_ENDS = {"cancelled": "was cancelled", "expired": "expired"}


class BatchExecution:
    """Executes a batch.

    num_workers: maximum number of its lines that are executed at the same time.
    """

    def __init__(
        self,
        batch: Batch,
        stores: tuple[BatchStore, FileStore],
        calls: InternalCalls,
        batch_slots: FreeBatchSlots,
        settings: ServerSettings,
        num_workers: int,
    ) -> None:
        self._batch = batch
        self._batches, self._files = stores
        self._batch_slots = batch_slots
        self._settings = settings
        self._num_workers = num_workers
        self._next_line = asyncio.Lock()
        self._executor = LineExecutor(
            calls,
            endpoints=(batch.endpoint,),
            max_line_bytes=settings.max_body_bytes,
            max_values=settings.max_json_values,
            max_attempts=None,
        )

    async def run(self) -> None:
        """Execute the batch until it is complete. A failure of the batch is stored in it.

        Can be cancelled; another execution then continues the batch.
        """
        batch = self._batch
        try:
            file = await asyncio.to_thread(open_input, self._files.path(batch.input_file_id))
            with file:
                if not batch.counts.total:
                    await self._validate(file)
                await self._execute(file)
        except APIError as error:
            code = error.code or "server_error"
            batch.failures.append(BatchFailure(code=code, message=str(error), param=error.param))
            await self._finish("failed")

    async def _validate(self, file: BinaryIO) -> None:
        """Count the lines. Raise APIError if there are none or too many."""
        batch, maximum = self._batch, self._settings.max_batch_lines
        count = await asyncio.to_thread(_count, self._lines(file), maximum)
        if not count:
            raise APIError("The input file has no lines.", code="empty_file", param="input_file_id")
        if count > maximum:
            raise APIError(
                f"The input file has more than {maximum} lines (--max-batch-lines). Split it.",
                code="too_many_lines",
                param="input_file_id",
            )
        batch.counts.total = count
        if batch.status == "validating":
            batch.set_status("in_progress")
        await self._batches.save(batch)

    def _lines(self, file: BinaryIO) -> Iterator[InputLine]:
        file.seek(0)
        return read_lines(file, self._settings.max_body_bytes)

    # --- lines --------------------------------------------------------------------------------

    async def _execute(self, file: BinaryIO) -> None:
        records = await self._open_records()
        try:
            end = await self._execute_lines(file, records)
            if end != "completed":
                await asyncio.to_thread(self._record_rest, records, end)
            await self._save_sizes(records)
        finally:
            await asyncio.to_thread(records.close)
        await self._finish(end)

    async def _open_records(self) -> RecordFiles:
        """Create or continue the output file and the error file."""
        batch, files = self._batch, self._files
        if not batch.output_id:
            batch.output_id = await files.reserve(batch.owner, 0, WRITING)
            batch.error_id = await files.reserve(batch.owner, 0, WRITING)
            await self._batches.save(batch)

        def open_both() -> RecordFiles:
            output, errors = files.create(batch.output_id), files.create(batch.error_id)
            return RecordFiles(output, errors, batch.counts)

        return await asyncio.to_thread(open_both)

    async def _execute_lines(self, file: BinaryIO, records: RecordFiles) -> str:
        """Execute the lines without a record. Return the final status."""
        if await self._batches.save(self._batch):
            return "cancelled"
        lines = self._lines(file)
        tasks = [asyncio.create_task(self._work(lines, records)) for _ in range(self._num_workers)]
        try:
            while time.time() < self._batch.expires_at:
                _, pending = await asyncio.wait(
                    tasks, timeout=SAVE_S, return_when=asyncio.FIRST_EXCEPTION
                )
                await self._save_sizes(records)
                if await self._batches.save(self._batch):
                    return "cancelled"
                _raise_failures(tasks)
                if not pending:
                    return "completed"
            return "expired"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, lines: Iterator[InputLine], records: RecordFiles) -> None:
        while True:
            async with self._batch_slots.take():
                async with self._next_line:
                    line = await asyncio.to_thread(self._next, lines, records)
                if line is None:
                    return
                record = await self._executor.record(
                    line,
                    record_id=record_id(self._batch.id, line.number),
                    caller=self._batch.owner,
                )
                await asyncio.to_thread(records.write, line.number, record)

    def _next(self, lines: Iterator[InputLine], records: RecordFiles) -> InputLine | None:
        """Return the next line without a record, or None. Blocks."""
        for line in lines:
            custom_id = records.done.get(line.number)
            if custom_id is None:
                return line
            self._executor.custom_ids.setdefault(custom_id, line.number)
        return None

    def _record_rest(self, records: RecordFiles, end: str) -> None:
        """Write an error for each line without a record. Blocks."""
        message = f"The batch {_ENDS[end]} before this line had a response."
        with open_input(self._files.path(self._batch.input_file_id)) as file:
            for line in self._lines(file):
                if line.number in records.done:
                    continue
                try:
                    custom_id = self._executor.read(line).custom_id
                except LineError as error:
                    custom_id = error.custom_id
                identity = record_id(self._batch.id, line.number)
                record = error_record(identity, custom_id, f"batch_{end}", message)
                records.write(line.number, record)

    async def _save_sizes(self, records: RecordFiles) -> None:
        """Store the sizes of the files. Raise APIError if the key has too many bytes."""
        batch, (output, errors) = self._batch, await asyncio.to_thread(records.sizes)
        sizes = {batch.output_id: output, batch.error_id: errors}
        await self._files.set_sizes(batch.owner, sizes)

    # --- end ----------------------------------------------------------------------------------

    async def _finish(self, end: str) -> None:
        """Make the files visible and store the final status."""
        batch = self._batch
        if end == "completed":
            batch.set_status("finalizing")
            await self._batches.save(batch)
        if batch.output_id:
            counts = batch.counts
            batch.output_file_id = await self._publish(batch.output_id, counts.completed, "output")
            batch.error_file_id = await self._publish(batch.error_id, counts.failed, "error")
        batch.set_status(end)
        await self._batches.save(batch)

    async def _publish(self, file_id: str, num_records: int, kind: str) -> str | None:
        """Make a file visible. Delete it and return None if it has no records."""
        batch, files = self._batch, self._files
        if not num_records:
            await files.discard(file_id)
            return None
        await files.finish(
            file_id,
            purpose="batch_output",
            name=f"{batch.id}_{kind}.jsonl",
            lifetime_s=batch.output_lifetime_s,
        )
        return file_id


def _raise_failures(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def _count(lines: Iterator[InputLine], maximum: int) -> int:
    count = 0
    for _ in lines:
        count += 1
        if count > maximum:
            break
    return count
