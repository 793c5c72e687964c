"""Writes a trace in Chrome's format, with the events of the lab's reports."""

from __future__ import annotations

from typing import TextIO

from dovetail_client_tools.engine_steps.records import Step
from dovetail_client_tools.trace.slices import Ended, Slice
from dovetail_lab.reports.perfetto import (
    ENGINE,
    REQUESTS,
    EventWriter,
    instant_event,
    process_names,
    slice_event,
    step_events,
    track_name,
)


class PerfettoFile:
    """A sink that writes each part immediately, so that its memory does not grow."""

    def __init__(self, file: TextIO) -> None:
        self.writer = EventWriter(file)
        self._lanes: set[int] = set()
        for event in process_names():
            self.writer.write(event)

    def add_request(self, number: int, name: str, num_prompt: int | None) -> None:
        """Write the name of a track."""
        self.writer.write(track_name(REQUESTS, number, name))

    def add_slice(self, item: Slice) -> None:
        """Write a slice."""
        times_ns = (item.begin_ns, item.end_ns - item.begin_ns)
        args = {"steps": item.num_steps, "tokens": item.num_tokens}
        self.writer.write(slice_event(REQUESTS, item.request, item.kind, times_ns, args))

    def add_ended(self, item: Ended) -> None:
        """Write an event for an end with a known reason."""
        if item.reason:
            name = f"ended: {item.reason}"
            self.writer.write(instant_event(REQUESTS, item.request, name, item.time_ns))

    def add_step(self, step: Step, lane: int) -> None:
        """Write a step and the counters after it."""
        if lane not in self._lanes:
            self._lanes.add(lane)
            self.writer.write(track_name(ENGINE, lane, f"steps {lane + 1}"))
        prefill = step.num_prefill_tokens
        tokens = {
            "step_id": step.step_id,
            "prefill_tokens": prefill,
            "decode_tokens": max(0, step.num_tokens - prefill),
            "new_tokens": step.num_new_tokens,
        }
        counts = {
            "num_used_blocks": step.num_used_blocks,
            "num_running": step.num_running,
            "num_waiting": step.num_waiting,
        }
        times_ns = (step.begin_ns, step.duration_ns)
        for event in step_events(times_ns, counts, tokens, track=lane):
            self.writer.write(event)
