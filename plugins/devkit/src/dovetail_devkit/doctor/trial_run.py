"""Loads plugins in separate processes, with a deadline.

First-party plugins are loaded in one process, because they are released together. Every other
distribution gets a separate process. If a process exits or hangs, the plugin that it was loading is
reported, and a new process continues with the next plugin. This process imports no plugin.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from tempfile import TemporaryFile
from typing import IO, Any

from dovetail.clock import MonotonicClock
from dovetail.machine import read_cores
from dovetail.plugins.metadata.discovery import Candidate
from dovetail.plugins.metadata.first_party import normalize_distribution
from dovetail.plugins.working_directory import working_directory_problem
from dovetail_devkit.doctor.trial import BEGIN

MAX_PROCESSES = 4
HEAVY = ("torch",)
"""Modules that are imported first, so that their import time is not counted for a plugin."""

_START = (
    "import json, sys\n"
    "task = json.loads(sys.argv[1])\n"
    "sys.path[:] = task['path']\n"
    "from dovetail_devkit.doctor.trial import run\n"
    "run(task)\n"
)
_POLL_S = 0.2
_MAX_NOISE = 2000
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of loading one plugin.

    error: why the plugin could not be loaded; "" if it was loaded. ended: whether the process
    exited during the load. hung: whether the deadline passed. noise: text written to the standard
    streams, also by native code. took_ns: load time without the import of `HEAVY`. refusals: the
    reasons of its probe, if the plugin cannot be used on this machine.
    """

    plugin: Candidate
    error: str = ""
    ended: bool = False
    hung: bool = False
    noise: str = ""
    took_ns: int = 0
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


def try_plugins(plugins: Sequence[Candidate], *, deadline_s: float) -> list[Trial]:
    """Load each of `plugins`. Return the trials in the same order.

    deadline_s: how long each plugin may take.
    """
    groups: dict[str, list[Candidate]] = {}
    for plugin in plugins:
        groups.setdefault(_group(plugin), []).append(plugin)
    num_workers = max(1, min(MAX_PROCESSES, read_cores().usable, len(groups)))
    with ThreadPoolExecutor(num_workers) as pool:
        tried = pool.map(lambda group: _try_group(group, deadline_s), groups.values())
        trials = {trial.plugin: trial for group in tried for trial in group}
    return [trials[plugin] for plugin in plugins]


def _group(plugin: Candidate) -> str:
    return "" if plugin.first_party else normalize_distribution(plugin.distribution)


def _try_group(plugins: list[Candidate], deadline_s: float) -> list[Trial]:
    done: list[Trial] = []
    while len(done) < len(plugins):
        done += _run_process(plugins[len(done) :], deadline_s)
    return done


def _run_process(plugins: list[Candidate], deadline_s: float) -> list[Trial]:
    """Return the trials of one process. The last plugin may have made it exit or hang."""
    reading, writing = os.pipe()
    task = {
        "fd": writing,
        "path": sys.path,
        "plugins": [(plugin.kind, _reference(plugin, plugins)) for plugin in plugins],
        "first": [name for name in HEAVY if any(_needs(p.distribution, name) for p in plugins)],
    }
    with TemporaryFile() as output, os.fdopen(reading, "rb") as pipe:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(task)],
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/" if working_directory_problem() else None,
        )
        os.close(writing)
        try:
            return _watch(process, pipe, output, plugins, deadline_s)
        finally:
            _end(process)


def _watch(
    process: subprocess.Popen[bytes],
    pipe: IO[bytes],
    output: IO[bytes],
    plugins: list[Candidate],
    deadline_s: float,
) -> list[Trial]:
    trials: list[Trial] = []
    begun_at = 0
    hung = True
    for record in _reports(process, pipe, deadline_s):
        if record is None:
            hung = False
        elif record["event"] == BEGIN:
            begun_at = record["offset"]
        else:
            noise = _read(output, begun_at, record["offset"])
            trials.append(_trial(plugins[record["number"]], record, noise))
    if len(trials) == len(plugins):
        return trials
    at_fault = plugins[len(trials)]
    noise = _read(output, begun_at, None)
    if hung:
        text = f"loading the plugin did not finish within {deadline_s:g} s"
        return [*trials, Trial(plugin=at_fault, error=text, hung=True, noise=noise)]
    text = f"the process exited while it loaded the plugin ({_exit_text(process.wait())})"
    return [*trials, Trial(plugin=at_fault, error=text, ended=True, noise=noise)]


def _reports(
    process: subprocess.Popen[bytes], pipe: IO[bytes], deadline_s: float
) -> Iterator[dict[str, Any] | None]:
    """Yield each report, and None when the process has exited. Stop at the deadline."""
    clock = MonotonicClock()
    left = b""
    since_ns = clock.now_ns()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (clock.now_ns() - since_ns) / 1e9 < deadline_s:
            data = _receive(process, pipe, selector)
            if data is None:
                continue
            if not data:
                yield None
                return
            *lines, left = (left + data).split(b"\n")
            since_ns = clock.now_ns() if lines else since_ns
            yield from (json.loads(line) for line in lines)


def _receive(
    process: subprocess.Popen[bytes], pipe: IO[bytes], selector: selectors.BaseSelector
) -> bytes | None:
    """Return new output of the process; b"" if it has exited, None if there is no output yet."""
    # Do not wait for the end of the pipe: a child may keep it open, and a plugin may close it.
    is_gone = process.poll() is not None
    if selector.select(0 if is_gone else _POLL_S):
        data = os.read(pipe.fileno(), 65536)
        if data:
            return data
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    return b"" if is_gone else None


def _trial(plugin: Candidate, record: dict[str, Any], noise: str) -> Trial:
    return Trial(
        plugin=plugin,
        error=record["error"],
        noise=noise,
        took_ns=record.get("ns", 0),
        notes=tuple(record.get("notes", ())),
        refusals=tuple(record.get("refusals", ())),
    )


def _read(output: IO[bytes], start: int, end: int | None) -> str:
    # Read with an offset, since the process shares the file position.
    size = _MAX_NOISE if end is None else min(end - start, _MAX_NOISE)
    return os.pread(output.fileno(), size, start).decode("utf-8", "replace").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children."""
    # The process and its children may have exited already.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _reference(plugin: Candidate, plugins: Sequence[Candidate]) -> str:
    same = [
        item for item in plugins if (item.kind, item.reference) == (plugin.kind, plugin.reference)
    ]
    return plugin.reference if len(same) == 1 else plugin.target


def _needs(distribution: str, searched: str) -> bool:
    """Return whether a distribution requires `searched`, also through first-party distributions."""
    visited: set[str] = set()
    left = [distribution]
    while left:
        name = normalize_distribution(left.pop())
        if name == searched:
            return True
        if name not in visited:
            visited.add(name)
            left += _requirements(name)
    return False


def _requirements(distribution: str) -> list[str]:
    try:
        texts = requires(distribution) or []
    except PackageNotFoundError:
        return []
    plain = (text for text in texts if "extra ==" not in text)
    return [match[0] for text in plain if (match := _NAME.match(text))]
