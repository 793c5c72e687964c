"""`dovetail trace`: writes the steps of a decision log or of a running server as a trace.

Exit codes: 0; 2 if the log or the server cannot be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dovetail.cli.client.connection import read_server
from dovetail.cli.client.help_lines import API_KEY_FILE_HELP
from dovetail.cli.frame.config_file import ConfigOption
from dovetail.cli.plugins_table import print_line
from dovetail.cli.terminal import printable, progress_note
from dovetail.errors import ConfigError
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    from dovetail_client_tools.trace.output_files import Description
    from dovetail_client_tools.trace.slices import TraceSink

MAX_DURATION_S = 3600.0
MAX_STEP = 2**62
_RANGE = re.compile(r"(\d{0,18}):(\d{0,18})")
_LOG_HELP = "A decision log: a file written with --decision-log."
_URL_HELP = "Read the steps of this server instead, such as http://127.0.0.1:8000."
_DURATION_HELP = "With --url: seconds during which steps are read. Ctrl-C ends the trace earlier."
_PERFETTO_HELP = "Write a trace in Chrome's format to this file, for Perfetto."
_HTML_HELP = "Write an HTML page with the timeline to this file, for a browser."
_STEPS_HELP = "Only the steps FROM:TO, by step number; TO is excluded."


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The files to write."""

    perfetto: Annotated[Path | None, Parameter(help=_PERFETTO_HELP)] = None
    html: Annotated[Path | None, Parameter(help=_HTML_HELP)] = None


_DEFAULT_OUTPUT = OutputOptions()


def trace(
    log: Annotated[Path | None, Parameter(help=_LOG_HELP)] = None,
    /,
    *,
    url: Annotated[str, Parameter(help=_URL_HELP, show_default=False)] = "",
    api_key_file: Annotated[Path | None, Parameter(help=API_KEY_FILE_HELP)] = None,
    duration_s: Annotated[float, Parameter(help=_DURATION_HELP)] = 10.0,
    steps: Annotated[str, Parameter(help=_STEPS_HELP, show_default=False)] = "",
    output: Annotated[OutputOptions, Parameter(name="*")] = _DEFAULT_OUTPUT,
    config: ConfigOption = None,
) -> int:
    """Write the steps of a decision log or of a running server as a trace."""
    if (log is None) == (not url):
        raise ConfigError("Specify either a decision log or --url with the address of a server.")
    if not 0 < duration_s <= MAX_DURATION_S or math.isnan(duration_s):
        raise ConfigError(
            f"--duration-s {duration_s:g} must be positive and at most {MAX_DURATION_S:g}."
        )
    if steps and url:
        raise ConfigError("--steps selects steps of a decision log; with --url, use --duration-s.")
    from dovetail_client_tools.trace.output_files import TraceFiles

    bounds = _bounds(steps)
    files = TraceFiles(output.perfetto, output.html)
    with files.write() as (sinks, finish):
        if log is not None:
            described = _read_log(log, bounds, sinks)
        else:
            described = _read_server(url, api_key_file, duration_s, sinks)
        messages = finish(described)
    for message in messages:
        print_line(printable(message))
    return 0


def _bounds(text: str) -> tuple[int, int]:
    """Return the first step and the step after the last one."""
    match = _RANGE.fullmatch(text or ":")
    first, last = (match[1], match[2]) if match else ("", "")
    bounds = (int(first or 0), int(last or MAX_STEP))
    if match is None or bounds[0] >= bounds[1]:
        raise ConfigError(f"--steps {shorten(text)} must be FROM:TO, such as 0:1000 or 5000:.")
    return bounds


def _read_log(path: Path, bounds: tuple[int, int], sinks: Sequence[TraceSink]) -> Description:
    from dovetail.decision_log import LogReader
    from dovetail_client_tools.trace.log_steps import LogSteps
    from dovetail_client_tools.trace.output_files import Description
    from dovetail_lab.summary import summarize, summary_rows

    reader, steps = LogReader(path), LogSteps(bounds)
    steps.builder.sinks = sinks
    summary = summarize(reader, steps)
    steps.end()
    notes = []
    if reader.truncated:
        notes.append("The log is truncated; its complete records were read.")
    if not steps.num_steps:
        notes.append("The log has no steps within --steps.")
    return Description(
        title=path.name, num_steps=steps.num_steps, rows=summary_rows(summary), notes=notes
    )


def _read_server(
    url: str, api_key_file: Path | None, duration_s: float, sinks: Sequence[TraceSink]
) -> Description:
    from dovetail.clock import MonotonicClock
    from dovetail_client_tools.engine_steps.reader import StepsReader
    from dovetail_client_tools.http_client.event_loop import run_in_loop
    from dovetail_client_tools.trace.output_files import Description
    from dovetail_client_tools.trace.server_steps import ServerTrace, follow
    from dovetail_client_tools.trace.slices import TraceBuilder

    server = read_server(url, api_key_file)
    builder = TraceBuilder(sinks, lambda number: str(number))
    result, reader = ServerTrace(), StepsReader(server)

    async def read_steps() -> None:
        try:
            await follow(reader, builder, duration_s, MonotonicClock(), result)
        finally:
            reader.close()

    try:
        with progress_note() as note:
            note(f"Reading the steps of {server.url} for {duration_s:g} s")
            run_in_loop(read_steps)
    except KeyboardInterrupt:
        result.problem = "Interrupted; the trace contains the steps so far."
    builder.end()
    rows = (
        ("server", server.url),
        ("model", result.model),
        ("policy", result.policy),
        ("steps", f"{result.num_steps:,}"),
    )
    notes = [result.problem] if result.problem else []
    if result.num_missed:
        notes.append(f"{result.num_missed:,} steps are missing: they were not read in time.")
    if not result.num_steps:
        notes.append("The engine executed no steps in this time.")
    title = f"{result.model or 'engine'} at {server.url}"
    return Description(title=title, num_steps=result.num_steps, rows=rows, notes=notes)
