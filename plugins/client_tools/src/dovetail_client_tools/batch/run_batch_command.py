"""`dovetail run-batch`: executes a file in OpenAI's batch format.

Exit codes: 0 if every line succeeded, 1 if lines failed, 130 after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from dovetail.cli.client.connection import Server, read_server
from dovetail.cli.client.help_lines import API_KEY_FILE_HELP, URL_HELP
from dovetail.cli.engine_options import (
    EngineOptions,
    changed_options,
    engine_args,
    make_optional_model,
)
from dovetail.cli.frame.config_file import ConfigOption
from dovetail.cli.terminal import count_text, print_message, printable
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail_client_tools.batch.output_file import Mode
    from dovetail_client_tools.batch.runner import Progress

    OptionalModelOptions = EngineOptions
    NO_OPTIONS: EngineOptions
else:
    OptionalModelOptions = make_optional_model()
    NO_OPTIONS = OptionalModelOptions()

BATCH_GROUP = Group("Batch options", sort_key=1)
MAX_CONCURRENCY = 4096
_INPUT_HELP = "File with one request per line, in OpenAI's batch format."
_OUTPUT_HELP = "File that receives one record for each line, in the order of completion."
_RESUME_HELP = "Continue the output file: execute only lines that have no record."
_OVERWRITE_HELP = "Delete the content of the output file."
_CONCURRENCY_HELP = "Number of lines that are executed at the same time."
_TIMEOUT_HELP = "Time limit of a request to a server, in seconds."


def _option(text: str) -> Parameter:
    return Parameter(help=text, group=BATCH_GROUP, negative="")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How the lines are executed."""

    resume: Annotated[bool, _option(_RESUME_HELP)] = False
    overwrite: Annotated[bool, _option(_OVERWRITE_HELP)] = False
    concurrency: Annotated[int, _option(_CONCURRENCY_HELP)] = 64
    url: Annotated[str | None, _option(URL_HELP)] = None
    api_key_file: Annotated[Path | None, _option(API_KEY_FILE_HELP)] = None
    timeout_s: Annotated[float, _option(_TIMEOUT_HELP)] = 3600.0


DEFAULT_BATCH = BatchOptions()


def run_batch(
    input_file: Annotated[Path, Parameter(name=["--input-file", "-i"], help=_INPUT_HELP)],
    output_file: Annotated[Path, Parameter(name=["--output-file", "-o"], help=_OUTPUT_HELP)],
    *,
    batch: Annotated[BatchOptions, Parameter(name="*")] = DEFAULT_BATCH,
    config: ConfigOption = None,
    engine: Annotated[OptionalModelOptions, Parameter(name="*")] = NO_OPTIONS,
) -> int:
    """Execute the requests of a file, with an engine in this process or a server."""
    mode, server = _mode(batch), _server(batch, engine)
    from dovetail_client_tools.batch.input_file import InputFile
    from dovetail_client_tools.batch.output_file import OutputFile
    from dovetail_client_tools.batch.progress import progress_bar

    lines = InputFile(input_file)
    if os.path.exists(output_file) and output_file.samefile(input_file):
        raise ConfigError("--output-file is the input file. Use another file.")
    output = OutputFile(output_file, mode)
    try:
        remains = any(line.number not in output.done for line in lines.lines())
        source = _source(server, batch.timeout_s, engine) if remains else _nothing
        with progress_bar() as show:
            done = asyncio.run(_execute(source, lines, output, batch.concurrency, show))
    except ConfigError as error:
        raise _resumable(error) from None
    except KeyboardInterrupt:
        print_message(f"Interrupted. Continue with --resume; {output_file} has all finished lines.")
        return 130
    finally:
        output.close()
    _print_summary(done, output_file)
    return 1 if done.num_failed else 0


def _mode(batch: BatchOptions) -> Mode:
    """Return how the output file is opened. Raise ConfigError for wrong options."""
    if not 1 <= batch.concurrency <= MAX_CONCURRENCY:
        raise ConfigError(
            f"--concurrency {batch.concurrency} must be between 1 and {MAX_CONCURRENCY}."
        )
    if not 0 < batch.timeout_s < math.inf:
        raise ConfigError(f"--timeout-s {batch.timeout_s:g} must be a positive number of seconds.")
    if batch.resume and batch.overwrite:
        raise ConfigError("Use --resume or --overwrite, not both.")
    return "resume" if batch.resume else "overwrite" if batch.overwrite else "new"


def _server(batch: BatchOptions, engine: OptionalModelOptions) -> Server | None:
    """Return the server, or None if the engine runs in this process."""
    if batch.url is None:
        if engine.model is None or batch.api_key_file is not None:
            raise ConfigError(
                "Specify the model with --model NAME, or the address of a server with --url URL."
            )
        return None
    invalid = [*(["--model"] if engine.model is not None else []), *changed_options(engine)]
    if invalid:
        raise ConfigError(
            f"{invalid[0]} has no effect with --url. Pass the option to the server: dovetail serve."
        )
    return read_server(batch.url, batch.api_key_file)


def _source(server: Server | None, timeout_s: float, engine: OptionalModelOptions) -> Any:
    """Return a function that opens a context, in which calls execute the lines."""
    if server is None:
        engine_config = engine_args(engine).create_engine_config()
        return lambda: _local(engine_config)
    return lambda: _remote(server, timeout_s)


@asynccontextmanager
async def _nothing() -> AsyncIterator[Any]:
    """Start no engine, because every line has a record."""
    yield None


@asynccontextmanager
async def _remote(server: Server, timeout_s: float) -> AsyncIterator[Any]:
    from dovetail_client_tools.batch.remote_calls import RemoteCalls

    calls = RemoteCalls(server, timeout_s=timeout_s)
    try:
        yield calls
    finally:
        calls.close()


@asynccontextmanager
async def _local(config: Any) -> AsyncIterator[Any]:
    from dovetail.engine.async_llm import AsyncLLM
    from dovetail_server.batches.local import local_calls

    async with AsyncLLM(config, max_waiting=MAX_CONCURRENCY) as llm:
        yield local_calls(llm, served_model_name=config.model.served_model_name)


async def _execute(
    source: Any, lines: Any, output: Any, concurrency: int, show: Callable[[Progress], None]
) -> Progress:
    from dovetail_client_tools.batch.runner import BatchRun
    from dovetail_server.batches.lines import LineExecutor

    async with source() as calls:
        executor = LineExecutor(calls)
        run = BatchRun(lines, output, executor, concurrency=concurrency, on_progress=show)
        return await run.run()


def _resumable(error: ConfigError) -> ConfigError:
    from dovetail_client_tools.batch.remote_calls import ServerLostError

    if isinstance(error, ServerLostError):
        return ConfigError(f"{error}\nContinue with --resume; finished lines are kept.")
    return error


def _print_summary(done: Progress, path: Path) -> None:
    resumed = f", {done.num_resumed:,} of them earlier" if done.num_resumed else ""
    num_ok = done.num_done - done.num_failed
    print_message(
        f"{count_text(done.num_done, 'line')}{resumed}: {num_ok:,} succeeded, "
        f"{done.num_failed:,} failed. Wrote {path}"
    )
    if done.first_error:
        print_message(printable(f"First failure: {done.first_error}"))
