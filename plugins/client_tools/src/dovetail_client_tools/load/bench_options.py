"""The options of `dovetail bench serve`, and their checks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from dovetail.errors import ConfigError

LOAD_GROUP = Group("Load options", sort_key=1)
REQUEST_GROUP = Group("Request options", sort_key=2)
REPORT_GROUP = Group("Report options", sort_key=3)
FIXED = "fixed"
MAX_REQUESTS = 1_000_000
MAX_IN_FLIGHT = 16_384
MAX_POINTS = 64
MAX_TOKENS = 1 << 20
_ARRIVALS = ("", "poisson", "gamma", "constant", "burst")


def _load(text: str) -> Parameter:
    return Parameter(help=text, group=LOAD_GROUP)


def _request(text: str) -> Parameter:
    return Parameter(help=text, group=REQUEST_GROUP)


def _report(text: str) -> Parameter:
    return Parameter(help=text, group=REPORT_GROUP)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options that select the requests, and the times at which they are sent."""

    request_rate: Annotated[
        str,
        _load(
            "Requests per second: a number, several such as 1,2,4, FROM:TO:COUNT, or inf. Several "
            "rates are measured one by one."
        ),
    ] = ""
    concurrency: Annotated[
        str,
        _load(
            "Without --request-rate: closed loop with this number of requests in flight; several "
            "such as 1,8,64 are measured one by one. With it: limit of requests in flight."
        ),
    ] = ""
    num_prompts: Annotated[int, _load("Number of requests per measurement.")] = 100
    workload: Annotated[
        str,
        _load(
            "fixed, a workload of the lab such as chat, conversations, agents or bursts, a trace "
            "such as azure:conv, or a trace file."
        ),
    ] = FIXED
    arrivals: Annotated[
        str,
        _load(
            "poisson, gamma, constant or burst; default: poisson, or the arrivals of the workload."
        ),
    ] = ""
    burstiness: Annotated[
        float, _load("Shape of --arrivals gamma; smaller values are more bursty.")
    ] = 0.25
    input_len: Annotated[int, _load("Prompt tokens per request, for --workload fixed.")] = 128
    output_len: Annotated[int, _load("Output tokens per request, for --workload fixed.")] = 64
    max_model_len: Annotated[
        int, _load("Maximum tokens of a request of other workloads; longer ones are shortened.")
    ] = 4096
    seed: Annotated[int, _load("Seed of arrivals, lengths and prompts.")] = 0
    warmup: Annotated[int, _load("Number of warm-up requests.")] = 2
    duration_s: Annotated[
        float, _load("Seconds after which a measurement sends no more requests; 0: no limit.")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options for the content of each request."""

    endpoint: Annotated[
        Literal["completions", "chat"], _request("Route: /v1/completions or /v1/chat/completions.")
    ] = "completions"
    ignore_eos: Annotated[
        bool, _request("Send ignore_eos, so that outputs have the intended length.")
    ] = True
    temperature: Annotated[float, _request("Sampling temperature.")] = 0.0
    extra_body: Annotated[str, _request("JSON object with additional request fields.")] = ""
    timeout_s: Annotated[float, _request("Time limit of a request in seconds.")] = 600.0


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of the report."""

    slo: Annotated[
        str, _report("Objectives in milliseconds for the goodput, such as ttft:500,tpot:50.")
    ] = ""
    json: Annotated[Path | None, _report("Write all results to this file.")] = None
    html: Annotated[
        Path | None, _report("Write a report with charts to this file; needs matplotlib.")
    ] = None


DEFAULT_LOAD, DEFAULT_REQUEST, DEFAULT_REPORT = LoadOptions(), RequestOptions(), ReportOptions()


@dataclass(frozen=True, kw_only=True)
class PlannedPoint:
    """A measurement. rate: 0 for a closed loop. concurrency: 0 for no limit."""

    rate: float
    concurrency: int


def planned_points(options: LoadOptions) -> list[PlannedPoint]:
    """Return the points that the options request. Raise ConfigError for invalid options."""
    rates = _read_numbers("--request-rate", options.request_rate, maximum=math.inf)
    limits = _read_numbers("--concurrency", options.concurrency, maximum=MAX_IN_FLIGHT)
    if any(value != int(value) for value in limits):
        raise ConfigError(f"--concurrency {options.concurrency} must be one or more integers.")
    if not rates:
        return [PlannedPoint(rate=0.0, concurrency=int(limit)) for limit in limits or [1]]
    if len(limits) > 1:
        raise ConfigError(
            "--concurrency with --request-rate is a limit, so it must be one number. Omit "
            "--request-rate to measure several closed loops."
        )
    limit = int(limits[0]) if limits else 0
    return [PlannedPoint(rate=rate, concurrency=limit) for rate in rates]


def _read_numbers(option: str, text: str, *, maximum: float) -> list[float]:
    if not text:
        return []
    try:
        values = _expanded(text)
    except (ValueError, OverflowError):
        values = []
    if not 1 <= len(values) <= MAX_POINTS or not all(0 < value <= maximum for value in values):
        raise ConfigError(
            f"{option} {text[:60]} must be 1 to {MAX_POINTS} positive numbers such as 1,2,4, or "
            "FROM:TO:COUNT such as 1:8:4."
        )
    return values


def _expanded(text: str) -> list[float]:
    if ":" not in text:
        return [float(part) for part in text.split(",")]
    low, high, count = text.split(":")
    steps = int(count)
    if not 2 <= steps <= MAX_POINTS:
        raise ValueError
    start, stop = float(low), float(high)
    return [round(start + (stop - start) * index / (steps - 1), 6) for index in range(steps)]


def check_options(load: LoadOptions, request: RequestOptions) -> None:
    """Raise ConfigError for values out of range."""
    bounds = {
        "num_prompts": (1, MAX_REQUESTS),
        "input_len": (1, MAX_TOKENS),
        "output_len": (1, MAX_TOKENS),
        "max_model_len": (2, MAX_TOKENS),
        "warmup": (0, 1000),
        "seed": (0, 2**63 - 1),
    }
    for name, (low, high) in bounds.items():
        value = getattr(load, name)
        if not low <= value <= high:
            raise ConfigError(f"{_flag(name)} {value} must be between {low:,} and {high:,}.")
    if not 0 <= load.duration_s < math.inf:
        raise ConfigError(f"--duration-s {load.duration_s:g} must not be negative.")
    if not 0 < load.burstiness < math.inf:
        raise ConfigError(f"--burstiness {load.burstiness:g} must be a positive number.")
    if not 0 < request.timeout_s < math.inf:
        raise ConfigError(f"--timeout-s {request.timeout_s:g} must be a positive number.")
    if load.arrivals not in _ARRIVALS:
        raise ConfigError(f"--arrivals {load.arrivals} must be one of {', '.join(_ARRIVALS[1:])}.")
    if load.arrivals and not load.request_rate:
        raise ConfigError("--arrivals needs --request-rate; a closed loop has no arrival times.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_extra_body(text: str) -> dict[str, Any]:
    """Return the fields of `--extra-body`. Raise ConfigError if it is not a JSON object."""
    if not text:
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f'--extra-body {text[:60]} is not a JSON object such as {{"top_k": 1}}.')
    return fields
