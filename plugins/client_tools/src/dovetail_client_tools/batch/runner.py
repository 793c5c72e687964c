"""Executes the lines of a batch concurrently, and writes a record for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError, RequestError
from dovetail_client_tools.batch.input_file import InputFile
from dovetail_client_tools.batch.output_file import OutputFile, record_id
from dovetail_server.batches.line_reader import InputLine
from dovetail_server.batches.lines import (
    LineError,
    LineExecutor,
    error_record,
    is_success,
    read_line,
)


@dataclass(kw_only=True)
class Progress:
    """Counts of lines. first_error: message of the first failed line of this run, or ""."""

    num_lines: int
    num_done: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    first_error: str = ""


class BatchRun:
    """One run over an input file.

    concurrency: lines that are executed at the same time. on_progress: called after each record.
    """

    def __init__(
        self,
        lines: InputFile,
        output: OutputFile,
        executor: LineExecutor,
        *,
        concurrency: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._lines = lines
        self._output = output
        self._executor = executor
        self._concurrency = concurrency
        self._notify = on_progress
        self.progress = Progress(num_lines=lines.num_lines, num_failed=output.num_failed)

    async def run(self) -> Progress:
        """Execute all lines that have no record yet.

        Raises ConfigError if the output belongs to another input, and ServerLostError if the server
        becomes unreachable.
        """
        remaining = self._remaining()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._work(remaining))
        except BaseExceptionGroup as errors:
            expected, others = errors.split((ConfigError, RequestError))
            if expected is None or others is not None:
                raise
            raise _first(expected) from None
        return self.progress

    def _remaining(self) -> Iterator[InputLine]:
        progress, done = self.progress, self._output.done
        for line in self._lines.lines():
            if line.number not in done:
                yield line
                continue
            self._check_same(line, done[line.number])
            progress.num_resumed += 1
            progress.num_done += 1
        self._notify(progress)

    def _check_same(self, line: InputLine, custom_id: str) -> None:
        """Raise ConfigError if a record of an earlier run is for another line."""
        try:
            actual = "" if line.text is None else read_line(line.text).custom_id
        except LineError as error:
            actual = error.custom_id
        if actual:
            self._executor.custom_ids.setdefault(actual, line.number)
        if actual != custom_id:
            raise ConfigError(
                f"The output has the record {custom_id!r} for line {line.number} of the input, "
                f"which is {actual!r}. Resume with the same input, or use another output file."
            )

    async def _work(self, lines: Iterator[InputLine]) -> None:
        for line in lines:
            record = await self._execute(line)
            self._output.write(record)
            progress = self.progress
            progress.num_done += 1
            if not is_success(record):
                progress.num_failed += 1
                progress.first_error = progress.first_error or _description(line.number, record)
            self._notify(progress)

    async def _execute(self, line: InputLine) -> dict[str, Any]:
        identity = record_id(line.number)
        try:
            request = self._executor.read(line)
            custom_id = request.custom_id
            return await self._executor.execute(request, record_id=identity)
        except LineError as error:
            return error_record(identity, error.custom_id, error.code, str(error))
        except RequestError as error:
            return error_record(identity, custom_id, "invalid_response", str(error))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _description(number: int, record: dict[str, Any]) -> str:
    error, response = record["error"], record["response"]
    if error is not None:
        return f"line {number}: {error['message']}"
    from dovetail_client_tools.load.stream_reader import error_text

    text = error_text(bytes(response["body"]))
    return f"line {number}: status {response['status_code']}: {text}"
