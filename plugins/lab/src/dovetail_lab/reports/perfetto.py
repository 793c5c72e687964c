"""Writes a run as a Chrome trace, which Perfetto and chrome://tracing show.

Tracks: engine steps by kind, phases of each request, and counters for blocks and queues. Source:
"Trace Event Format", Google.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dovetail_lab.simulation.results import NEVER, RequestColumns, StepColumns

ENGINE, REQUESTS, COUNTERS = 1, 2, 3
_PROCESSES = {ENGINE: "engine", REQUESTS: "requests", COUNTERS: "counters"}
_COUNTERS = {
    "num_used_blocks": "KV blocks in use",
    "num_running": "running requests",
    "num_waiting": "waiting requests",
}
_US = 1000


def write_trace(
    path: Path, requests: RequestColumns, steps: StepColumns | None, names: Sequence[str]
) -> int:
    """Write the events of a run; return their number. names: ids of the requests, in order."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in trace_events(requests, steps, names):
            file.write((",\n" if count else "") + json.dumps(event))
            count += 1
        file.write("\n]}\n")
    return count


def trace_events(
    requests: RequestColumns, steps: StepColumns | None, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, as the format defines them; times are in microseconds."""
    for number, name in _PROCESSES.items():
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    if steps is not None:
        yield from _steps(steps)
    for index, name in enumerate(names):
        yield {
            "ph": "M",
            "pid": REQUESTS,
            "tid": index,
            "name": "thread_name",
            "args": {"name": name},
        }
        yield from _phases(requests, index)


def _steps(steps: StepColumns) -> Iterator[dict[str, Any]]:
    for index, start in enumerate(steps.start_ns):
        prefill, decode = steps.num_prefill_tokens[index], steps.num_decode_tokens[index]
        kind = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        yield {
            "ph": "X",
            "pid": ENGINE,
            "tid": 0,
            "name": kind,
            "ts": start / _US,
            "dur": steps.duration_ns[index] / _US,
            "args": {
                "steps": steps.num_steps[index],
                "prefill_tokens": prefill,
                "decode_tokens": decode,
            },
        }
        for column, name in _COUNTERS.items():
            yield {
                "ph": "C",
                "pid": COUNTERS,
                "name": name,
                "ts": (start + steps.duration_ns[index]) / _US,
                "args": {"value": getattr(steps, column)[index]},
            }


def _phases(requests: RequestColumns, index: int) -> Iterator[dict[str, Any]]:
    end = requests.finished_ns[index]
    times = (
        ("waiting", requests.arrival_ns[index]),
        ("prefill", requests.admitted_ns[index]),
        ("decode", requests.first_token_ns[index]),
        ("", end if end != NEVER else requests.last_token_ns[index]),
    )
    for (name, begin), (_, stop) in itertools.pairwise(times):
        if begin != NEVER and stop != NEVER and stop >= begin:
            yield {
                "ph": "X",
                "pid": REQUESTS,
                "tid": index,
                "name": name,
                "ts": begin / _US,
                "dur": (stop - begin) / _US,
                "args": {"preemptions": requests.num_preemptions[index]},
            }
