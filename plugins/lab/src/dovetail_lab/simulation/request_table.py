"""Records the outputs of a simulated run: times and counts per request, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from dovetail.interfaces import EngineCoreOutputs
from dovetail.plan import SchedulerOutput
from dovetail.request import FinishReason
from dovetail.scheduling.decode_stretch import DecodeStretch
from dovetail_lab.simulation.prompts import OUTPUT_TOKEN, STOP_TOKEN, stops
from dovetail_lab.simulation.results import NEVER, RequestColumns
from dovetail_lab.simulation.setup import Times
from dovetail_lab.workloads.workload import WorkloadRequest

_UNKNOWN_ROW = -1

_MAX_SCALAR = 8
"""Up to this number of requests, a loop over a step's requests is faster than numpy."""

_Column: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class _Columns:
    """The columns of `RequestColumns`, each as an array and as a numpy view of the same memory.

    Reading one value is much faster from an `array` than from a numpy array.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def make(self, value: int) -> tuple[array[int], _Column]:
        """Return a column of equal values, int64."""
        column = array("q", (value,)) * self._size
        return column, np.frombuffer(column, dtype=np.int64)


class RequestTable:
    """The times and counts of all requests, by their index in the workload.

    The table also stores which request is in each batch slot, and in which step each request must
    stop. numbers: the index of each request id.
    """

    def __init__(self, requests: Sequence[WorkloadRequest], *, max_num_seqs: int) -> None:
        self.numbers = {request.request_id: number for number, request in enumerate(requests)}
        last = (item.num_prompt_tokens + item.num_output_tokens - 1 for item in requests)
        self._last_position = array("q", last)
        self._last_positions = np.frombuffer(self._last_position, dtype=np.int64)
        self._stops = array("B", map(stops, requests))
        self._all_stops = np.frombuffer(self._stops, dtype=np.uint8)
        self._in_row, self._in_rows = _Columns(max_num_seqs).make(_UNKNOWN_ROW)
        columns = _Columns(len(requests))
        self.arrival_ns, _ = columns.make(NEVER)
        self._admitted_ns, _ = columns.make(NEVER)
        self._first_token_ns, self._first_tokens_ns = columns.make(NEVER)
        self._last_token_ns, self._last_tokens_ns = columns.make(NEVER)
        self._finished_ns, _ = columns.make(NEVER)
        self._num_output, self._num_outputs = columns.make(0)
        self._max_gap_ns, self._max_gaps_ns = columns.make(0)
        self._num_cached, _ = columns.make(0)
        self._num_admissions, _ = columns.make(0)
        self._num_computed, self._all_computed = columns.make(0)
        self._num_recomputed, self._all_recomputed = columns.make(0)
        self._failed, _ = columns.make(0)

    def sample(self, plan: SchedulerOutput, planned_ns: int, end_ns: int) -> array[int]:
        """Record a step that ends at `end_ns`. Return the sampled tokens, int32, in plan order."""
        for new in plan.joins:
            self._join(self.numbers[new.request_id], new.row, planned_ns)
        if len(plan.rows) <= _MAX_SCALAR:
            return self._sample_few(plan, end_ns)
        requests = self._in_rows[np.frombuffer(plan.rows, dtype=np.int32)]
        starts = np.frombuffer(plan.starts, dtype=np.int32)
        ends = starts + np.frombuffer(plan.num_tokens, dtype=np.int32)
        if plan.joins:
            lost = self._all_computed[requests] - starts
            self._all_recomputed[requests] += np.maximum(lost, 0)
        self._all_computed[requests] = ends
        is_sampled = np.frombuffer(plan.samples, dtype=np.uint8).astype(bool)
        sampled, ends = requests[is_sampled], ends[is_sampled]
        last = self._last_positions[sampled]
        self._record_outputs(sampled[ends <= last], end_ns)
        tokens = np.full(len(sampled), OUTPUT_TOKEN, dtype=np.int32)
        tokens[(ends == last) & (self._all_stops[sampled] != 0)] = STOP_TOKEN
        return array("i", tokens.tobytes())

    def _sample_few(self, plan: SchedulerOutput, end_ns: int) -> array[int]:
        """Do the work of `sample` after the joins, request by request."""
        tokens = array("i")
        for row, start, count, is_sampled in zip(
            plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True
        ):
            number, end = self._in_row[row], start + count
            if self._num_computed[number] > start:  # computed before a preemption
                self._num_recomputed[number] += self._num_computed[number] - start
            self._num_computed[number] = end
            if not is_sampled:
                continue
            last = self._last_position[number]
            if end <= last:
                self._record_output(number, end_ns)
            is_stop = end == last and self._stops[number]
            tokens.append(STOP_TOKEN if is_stop else OUTPUT_TOKEN)
        return tokens

    def num_decode_runs(self, plan: SchedulerOutput) -> int:
        """Return the number of requests in a recorded plan that decode one token."""
        rows = np.frombuffer(plan.rows, dtype=np.int32)
        is_single = np.frombuffer(plan.num_tokens, dtype=np.int32) == 1
        has_output = self._first_tokens_ns[self._in_rows[rows]] != NEVER
        return int(np.count_nonzero(is_single & has_output))

    def num_steps_to_stop(self, stretch: DecodeStretch) -> int:
        """Return how many decode steps can be skipped before the first request stops."""
        rows, starts = stretch.rows, stretch.starts
        if len(rows) <= _MAX_SCALAR:
            in_row, last = self._in_row, self._last_position
            pairs = zip(rows, starts, strict=True)
            return min([last[in_row[row]] - start for row, start in pairs]) - 1
        requests = self._in_rows[np.frombuffer(rows, dtype=np.int32)]
        left = self._last_positions[requests] - np.frombuffer(starts, dtype=np.int32)
        return int(left.min()) - 1

    def last_tokens(self, rows: array[int]) -> array[int]:
        """Return the token that each of these batch slots samples; the last may be a stop token."""
        tokens = array("i")
        for number in map(self._in_row.__getitem__, rows):
            is_last = self._num_computed[number] + 1 == self._last_position[number]
            tokens.append(STOP_TOKEN if is_last and self._stops[number] else OUTPUT_TOKEN)
        return tokens

    def skip(self, rows: array[int], ends_ns: Times) -> None:
        """Record consecutive steps in which each of these batch slots decodes one token.

        ends_ns: the end of each step.
        """
        num_steps, first_ns, last_ns = len(ends_ns), int(ends_ns[0]), int(ends_ns[-1])
        gap_ns = int((ends_ns[1:] - ends_ns[:-1]).max()) if num_steps > 1 else 0
        if len(rows) > _MAX_SCALAR:
            requests = self._in_rows[np.frombuffer(rows, dtype=np.int32)]
            self._record_outputs(requests, first_ns)
            self._max_gaps_ns[requests] = np.maximum(self._max_gaps_ns[requests], gap_ns)
            self._last_tokens_ns[requests] = last_ns
            self._num_outputs[requests] += num_steps - 1
            self._all_computed[requests] += num_steps
            return
        for number in map(self._in_row.__getitem__, rows):
            self._record_output(number, first_ns)
            if gap_ns > self._max_gap_ns[number]:
                self._max_gap_ns[number] = gap_ns
            self._last_token_ns[number] = last_ns
            self._num_output[number] += num_steps - 1
            self._num_computed[number] += num_steps

    def record(self, outputs: EngineCoreOutputs, now_ns: int) -> list[int]:
        """Record the requests that end with these outputs. Return their indices."""
        self._note_cached(outputs.num_cached_tokens)
        return [
            self.finish(item.request_id, now_ns, failed=item.reason is FinishReason.ERROR)
            for item in outputs.finished
        ]

    def finish(self, request_id: str, now_ns: int, *, failed: bool = False) -> int:
        """Record the end of a request. Return its index."""
        number = self.numbers[request_id]
        self._finished_ns[number] = now_ns
        self._failed[number] = failed
        return number

    def columns(self) -> RequestColumns:
        """Return the columns of all requests."""
        return RequestColumns(
            arrival_ns=self.arrival_ns[:],
            admitted_ns=self._admitted_ns[:],
            first_token_ns=self._first_token_ns[:],
            last_token_ns=self._last_token_ns[:],
            finished_ns=self._finished_ns[:],
            num_output_tokens=self._num_output[:],
            max_gap_ns=self._max_gap_ns[:],
            num_cached_tokens=self._num_cached[:],
            num_preemptions=array("q", (max(n - 1, 0) for n in self._num_admissions)),
            num_recomputed_tokens=self._num_recomputed[:],
            failed=self._failed[:],
        )

    def _join(self, number: int, row: int, planned_ns: int) -> None:
        self._in_row[row] = number
        self._num_admissions[number] += 1
        if self._admitted_ns[number] == NEVER:
            self._admitted_ns[number] = planned_ns

    def _note_cached(self, num_cached_tokens: Mapping[str, int]) -> None:
        for request_id, count in num_cached_tokens.items():
            self._num_cached[self.numbers[request_id]] = count

    def _record_output(self, number: int, now_ns: int) -> None:
        """Record one output token of a request."""
        before = self._last_token_ns[number]
        if before == NEVER:
            self._first_token_ns[number] = now_ns
        elif now_ns - before > self._max_gap_ns[number]:
            self._max_gap_ns[number] = now_ns - before
        self._last_token_ns[number] = now_ns
        self._num_output[number] += 1

    def _record_outputs(self, requests: _Column, now_ns: int) -> None:
        """Record one output token for each of these requests."""
        before = self._last_tokens_ns[requests]
        is_first = before == NEVER
        if is_first.any():
            self._first_tokens_ns[requests[is_first]] = now_ns
        gaps = np.where(is_first, 0, now_ns - before)
        self._max_gaps_ns[requests] = np.maximum(self._max_gaps_ns[requests], gaps)
        self._last_tokens_ns[requests] = now_ns
        self._num_outputs[requests] += 1
