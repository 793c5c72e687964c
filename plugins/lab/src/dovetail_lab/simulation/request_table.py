"""Records the outputs of a simulated run: times and counts per request, as numpy columns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.interfaces import EngineCoreOutputs
from dovetail.plan import SchedulerOutput
from dovetail.request import FinishReason
from dovetail_lab.simulation.prompts import OUTPUT_TOKEN, STOP_TOKEN, stops
from dovetail_lab.simulation.results import NEVER, RequestColumns
from dovetail_lab.simulation.setup import Times
from dovetail_lab.workloads.workload import WorkloadRequest

_UNKNOWN_ROW = -1


class RequestTable:
    """The times and counts of all requests, by their number in the workload.

    It knows the requests in the rows of the engine, and in which step each request must stop.
    """

    def __init__(self, requests: Sequence[WorkloadRequest], *, max_num_seqs: int) -> None:
        size = len(requests)
        self.numbers = {request.request_id: number for number, request in enumerate(requests)}
        lengths = [request.num_prompt_tokens + request.num_output_tokens for request in requests]
        self._last_position = np.array(lengths, dtype=np.int64) - 1
        self._stops = np.array([stops(request) for request in requests], dtype=bool)
        self._in_row = np.full(max_num_seqs, _UNKNOWN_ROW, dtype=np.int64)
        self.arrival_ns = np.full(size, NEVER, dtype=np.int64)
        self._admitted_ns = np.full(size, NEVER, dtype=np.int64)
        self._first_token_ns = np.full(size, NEVER, dtype=np.int64)
        self._last_token_ns = np.full(size, NEVER, dtype=np.int64)
        self._finished_ns = np.full(size, NEVER, dtype=np.int64)
        self._num_output = np.zeros(size, dtype=np.int64)
        self._max_gap_ns = np.zeros(size, dtype=np.int64)
        self._num_cached = np.zeros(size, dtype=np.int64)
        self._num_admissions = np.zeros(size, dtype=np.int64)
        self._num_computed = np.zeros(size, dtype=np.int64)
        self._num_recomputed = np.zeros(size, dtype=np.int64)
        self.failed = np.zeros(size, dtype=np.int64)

    def sample(self, plan: SchedulerOutput, planned_ns: int, end_ns: int) -> array[int]:
        """Record a step that ends at `end_ns`. Return the sampled tokens, int32, in plan order."""
        for new in plan.joins:
            self._join(self.numbers[new.request_id], new.row, planned_ns)
        rows = np.frombuffer(plan.rows, dtype=np.int32)
        requests = self._in_row[rows]
        starts = np.frombuffer(plan.starts, dtype=np.int32)
        ends = starts + np.frombuffer(plan.num_tokens, dtype=np.int32)
        if plan.joins:
            lost = self._num_computed[requests] - starts
            self._num_recomputed[requests] += np.where(ends > starts, np.maximum(lost, 0), 0)
        self._num_computed[requests] = ends
        is_sampled = np.frombuffer(plan.samples, dtype=np.uint8).astype(bool)
        sampled, ends = requests[is_sampled], ends[is_sampled]
        last = self._last_position[sampled]
        self._record_outputs(sampled[ends <= last], end_ns)
        tokens = np.full(len(sampled), OUTPUT_TOKEN, dtype=np.int32)
        tokens[(ends == last) & self._stops[sampled]] = STOP_TOKEN
        return array("i", tokens.tobytes())

    def num_decode_runs(self, plan: SchedulerOutput) -> int:
        """Return the number of requests in a recorded plan that decode one token."""
        rows = np.frombuffer(plan.rows, dtype=np.int32)
        is_single = np.frombuffer(plan.num_tokens, dtype=np.int32) == 1
        has_output = self._first_token_ns[self._in_row[rows]] != NEVER
        return int(np.count_nonzero(is_single & has_output))

    def num_steps_to_stop(self, rows: array[int], starts: array[int]) -> int:
        """Return how many steps can follow before the first of these decoding rows stops."""
        requests = self._in_row[np.frombuffer(rows, dtype=np.int32)]
        left = self._last_position[requests] - np.frombuffer(starts, dtype=np.int32)
        return int(left.min()) - 1

    def skip(self, rows: array[int], ends_ns: Times) -> None:
        """Record consecutive steps in which each of these rows decodes one token.

        ends_ns: the end of each step.
        """
        requests = self._in_row[np.frombuffer(rows, dtype=np.int32)]
        self._record_outputs(requests, int(ends_ns[0]))
        if len(ends_ns) > 1:
            gap = int(np.diff(ends_ns).max())
            self._max_gap_ns[requests] = np.maximum(self._max_gap_ns[requests], gap)
            self._last_token_ns[requests] = ends_ns[-1]
            self._num_output[requests] += len(ends_ns) - 1
        self._num_computed[requests] += len(ends_ns)

    def finish(self, outputs: EngineCoreOutputs, now_ns: int) -> list[str]:
        """Record the requests that end with these outputs. Return their ids."""
        self._note_cached(outputs.num_cached_tokens)
        ended = []
        for finished in outputs.finished:
            number = self.numbers[finished.request_id]
            self._finished_ns[number] = now_ns
            self.failed[number] = finished.reason is FinishReason.ERROR
            ended.append(finished.request_id)
        return ended

    def reject(self, number: int, now_ns: int) -> None:
        """Record that the engine rejected a request."""
        self.failed[number] = 1
        self._finished_ns[number] = now_ns

    def columns(self) -> RequestColumns:
        """Return the columns of all requests."""
        return RequestColumns(
            arrival_ns=_int64(self.arrival_ns),
            admitted_ns=_int64(self._admitted_ns),
            first_token_ns=_int64(self._first_token_ns),
            last_token_ns=_int64(self._last_token_ns),
            finished_ns=_int64(self._finished_ns),
            num_output_tokens=_int64(self._num_output),
            max_gap_ns=_int64(self._max_gap_ns),
            num_cached_tokens=_int64(self._num_cached),
            num_preemptions=_int64(np.maximum(self._num_admissions - 1, 0)),
            num_recomputed_tokens=_int64(self._num_recomputed),
            failed=_int64(self.failed),
        )

    def _join(self, number: int, row: int, planned_ns: int) -> None:
        self._in_row[row] = number
        self._num_admissions[number] += 1
        if self._admitted_ns[number] == NEVER:
            self._admitted_ns[number] = planned_ns

    def _note_cached(self, num_cached_tokens: Mapping[str, int]) -> None:
        for request_id, count in num_cached_tokens.items():
            self._num_cached[self.numbers[request_id]] = count

    def _record_outputs(self, requests: np.ndarray[Any, Any], now_ns: int) -> None:
        """Record one output token for each of these requests."""
        before = self._last_token_ns[requests]
        is_first = before == NEVER
        if is_first.any():
            self._first_token_ns[requests[is_first]] = now_ns
        gaps = np.where(is_first, 0, now_ns - before)
        self._max_gap_ns[requests] = np.maximum(self._max_gap_ns[requests], gaps)
        self._last_token_ns[requests] = now_ns
        self._num_output[requests] += 1


def _int64(column: np.ndarray[Any, Any]) -> array[int]:
    return array("q", column.astype(np.int64).tobytes())
