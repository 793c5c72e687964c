"""`dovetail bench serve`: measures a server under load.

Exit codes: 0; 1 if no request of a measurement succeeded; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dovetail.cli.client.connection import first_model, read_server
from dovetail.cli.client.help_lines import API_KEY_FILE_HELP, URL_HELP
from dovetail.cli.frame.config_file import ConfigOption
from dovetail.cli.plugins_table import print_line
from dovetail.cli.terminal import print_message, progress_note
from dovetail.clock import MonotonicClock
from dovetail.errors import ConfigError
from dovetail_client_tools.load.bench_options import (
    DEFAULT_LOAD,
    DEFAULT_REPORT,
    DEFAULT_REQUEST,
    LoadOptions,
    ReportOptions,
    RequestOptions,
    check_options,
    planned_points,
    read_extra_body,
)

DEFAULT_URL = "http://127.0.0.1:8000"
_MODEL_HELP = "Name of a model of the server; default: the first model that the server lists."


def bench_serve(
    *,
    url: Annotated[str, Parameter(help=URL_HELP)] = DEFAULT_URL,
    api_key_file: Annotated[Path | None, Parameter(help=API_KEY_FILE_HELP)] = None,
    model: Annotated[str | None, Parameter(help=_MODEL_HELP)] = None,
    config: ConfigOption = None,
    load: Annotated[LoadOptions, Parameter(name="*")] = DEFAULT_LOAD,
    request: Annotated[RequestOptions, Parameter(name="*")] = DEFAULT_REQUEST,
    report: Annotated[ReportOptions, Parameter(name="*")] = DEFAULT_REPORT,
) -> int:
    """Measure a server under load, with any OpenAI-compatible API."""
    from dovetail_client_tools.http_client.event_loop import run_in_loop
    from dovetail_client_tools.load.load_test import LoadTest
    from dovetail_client_tools.load.point import read_objectives
    from dovetail_client_tools.load.report import LoadReport, print_report, write_json

    check_options(load, request)
    points, objectives = planned_points(load), read_objectives(report.slo)
    extra_body = read_extra_body(request.extra_body)
    _check_files(report)
    server = read_server(url, api_key_file)
    name = model or first_model(server)
    fields = {
        "model": name,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": request.temperature,
        **({"ignore_eos": True} if request.ignore_eos else {}),
        **extra_body,
    }
    is_interrupted = False
    with progress_note() as note:
        test = LoadTest(server, load, request, fields, MonotonicClock(), note)
        try:
            run_in_loop(lambda: test.run(points, objectives))
        except KeyboardInterrupt:
            is_interrupted = True
    case = {**asdict(load), **asdict(request)}
    result = LoadReport(
        url=server.url, model=name, case=case, objectives=objectives, points=test.points
    )
    if test.points:
        print_report(result)
        if report.json is not None:
            write_json(report.json, result)
            print_line(f"Wrote {report.json}")
        if report.html is not None:
            _write_page(report.html, result)
    if is_interrupted:
        print_message("Interrupted. Only complete measurements are reported.")
        return 130
    return 0 if all(point.num_ok for point in test.points) else 1


def _check_files(report: ReportOptions) -> None:
    """Raise ConfigError before the test, not after it."""
    for option, path in (("--json", report.json), ("--html", report.html)):
        if path is not None and not os.path.isdir(path.absolute().parent):
            raise ConfigError(f"{option} {path} is in a directory that does not exist.")
    if report.html is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--html needs matplotlib. Run: pip install 'dovetail-client-tools[report]'"
        )


def _write_page(path: Path, result: Any) -> None:
    from dovetail_client_tools.load.report import write_text
    from dovetail_client_tools.load.report_page import page

    write_text("--html", path, page(result))
    print_line(f"Wrote {path}")
