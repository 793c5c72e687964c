"""Writes a run as a Chrome trace, which Perfetto and chrome://tracing show.

Tracks: engine steps by kind, phases of each request, and counters for blocks and queues. Source:
"Trace Event Format", Google.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from dovetail_lab.simulation.results import NEVER, RequestColumns, StepColumns

ENGINE, REQUESTS, COUNTERS = 1, 2, 3
_PROCESSES = {ENGINE: "engine", REQUESTS: "requests", COUNTERS: "counters"}
_COUNTERS = {
    "num_used_blocks": "KV blocks in use",
    "num_running": "running requests",
    "num_waiting": "waiting requests",
}
_US = 1000

Event = dict[str, Any]
"""One event, as the format defines it."""


def write_trace(
    path: Path, requests: RequestColumns, steps: StepColumns | None, names: Sequence[str]
) -> int:
    """Write the events of a run. Return the number of events. names: request ids, in order."""
    with path.open("w", encoding="utf-8") as file:
        writer = EventWriter(file)
        for event in trace_events(requests, steps, names):
            writer.write(event)
        writer.end()
    return writer.num_events


class EventWriter:
    """Writes events to a file, one at a time."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.num_events = 0
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')

    def write(self, event: Mapping[str, Any]) -> None:
        """Write an event."""
        self._file.write((",\n" if self.num_events else "") + json.dumps(event))
        self.num_events += 1

    def end(self) -> None:
        """Write the end of the file. It must be called once, after all events."""
        self._file.write("\n]}\n")


def trace_events(
    requests: RequestColumns, steps: StepColumns | None, names: Sequence[str]
) -> Iterator[Event]:
    """Yield the events of a run, as the format defines them; times are in microseconds."""
    yield from process_names()
    if steps is not None:
        yield from _steps(steps)
    for index, name in enumerate(names):
        yield track_name(REQUESTS, index, name)
        yield from _phases(requests, index)


def process_names() -> Iterator[Event]:
    """Yield the names of the three groups of tracks."""
    for number, name in _PROCESSES.items():
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}


def track_name(group: int, track: int, name: str) -> Event:
    """Return the event that names a track."""
    return {
        "ph": "M",
        "pid": group,
        "tid": track,
        "name": "thread_name",
        "args": {"name": name},
    }


def slice_event(
    group: int, track: int, name: str, times_ns: tuple[int, int], args: Mapping[str, Any]
) -> Event:
    """Return a slice event. times_ns: start and duration."""
    return {
        "ph": "X",
        "pid": group,
        "tid": track,
        "name": name,
        "ts": times_ns[0] / _US,
        "dur": times_ns[1] / _US,
        "args": args,
    }


def instant_event(group: int, track: int, name: str, time_ns: int) -> Event:
    """Return an instant event on a track."""
    return {"ph": "i", "s": "t", "pid": group, "tid": track, "name": name, "ts": time_ns / _US}


def step_events(
    times_ns: tuple[int, int],
    counts: Mapping[str, int],
    tokens: Mapping[str, int],
    *,
    track: int = 0,
) -> Iterator[Event]:
    """Yield the slice of a step, and the counters after it.

    times_ns: start and duration. counts: by column name of `StepColumns`. tokens: the arguments of
    the slice, such as "prefill_tokens" and "decode_tokens".
    """
    prefill, decode = tokens["prefill_tokens"], tokens["decode_tokens"]
    kind = "mixed" if prefill and decode else "prefill" if prefill else "decode"
    yield slice_event(ENGINE, track, kind, times_ns, tokens)
    for column, name in _COUNTERS.items():
        yield {
            "ph": "C",
            "pid": COUNTERS,
            "name": name,
            "ts": sum(times_ns) / _US,
            "args": {"value": counts[column]},
        }


def _steps(steps: StepColumns) -> Iterator[Event]:
    for index, start in enumerate(steps.start_ns):
        tokens = {
            "steps": steps.num_steps[index],
            "prefill_tokens": steps.num_prefill_tokens[index],
            "decode_tokens": steps.num_decode_tokens[index],
        }
        counts = {column: getattr(steps, column)[index] for column in _COUNTERS}
        yield from step_events((start, steps.duration_ns[index]), counts, tokens)


def _phases(requests: RequestColumns, index: int) -> Iterator[Event]:
    end = requests.finished_ns[index]
    times = (
        ("waiting", requests.arrival_ns[index]),
        ("prefill", requests.admitted_ns[index]),
        ("decode", requests.first_token_ns[index]),
        ("", end if end != NEVER else requests.last_token_ns[index]),
    )
    for (name, begin), (_, stop) in itertools.pairwise(times):
        if begin != NEVER and stop != NEVER and stop >= begin:
            args = {"preemptions": requests.num_preemptions[index]}
            yield slice_event(REQUESTS, index, name, (begin, stop - begin), args)
