"""Reads the requests of a decision log, so that a real run can be repeated as a workload.

The output length of a request is the number of tokens that were sampled for it. Prompts with a
common prefix get common prefix hashes. The whole log is read before the first row is yielded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dovetail.decision_log import (
    LogReader,
    PlanDecoder,
    RecordKind,
    decode_output,
    decode_request,
    split_readings,
)
from dovetail.errors import UserError
from dovetail.request import EngineCoreRequest
from dovetail_lab.workloads.readers.trace_row import RowChecker, TraceError, TraceRow
from dovetail_lab.workloads.workload import HASH_BLOCK_TOKENS


def read_decision_log(path: Path) -> Iterator[TraceRow]:
    """Yield one row per added request, in the order of arrival; `line` is the record number.

    Raises TraceError if the file is not a decision log or is damaged.
    """
    try:
        requests, num_sampled = _read(LogReader(path))
    except TraceError:
        raise
    except (UserError, ValueError, KeyError, IndexError, TypeError) as error:
        raise TraceError(str(path), 0, f"the decision log cannot be read: {error}") from error
    blocks = _BlockNumbers()
    order = sorted(enumerate(requests, 1), key=lambda item: item[1].arrival_ns)
    rows = (
        TraceRow(
            line=number,
            arrival_ns=request.arrival_ns,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=max(1, num_sampled[request.request_id]),
            tenant=request.tenant,
            priority=request.priority,
            max_tokens=request.max_tokens,
            prefix_hashes=blocks.of(request.prompt_token_ids),
        )
        for number, request in order
    )
    return RowChecker(str(path)).in_order(rows)


def _read(reader: LogReader) -> tuple[list[EngineCoreRequest], Counter[str]]:
    requests: list[EngineCoreRequest] = []
    num_sampled: Counter[str] = Counter()
    names: dict[int, str] = {}
    plans, rows_in_flight = PlanDecoder(), list[list[str]]()
    for record in reader:
        _, payload = split_readings(record.payload)
        if record.kind is RecordKind.ADD:
            requests.append(decode_request(payload))
        elif record.kind is RecordKind.PLAN:
            plan = plans.decode(payload)
            names |= {join.row: join.request_id for join in plan.joins}
            rows_in_flight.append([names[row] for row in plan.rows])
        elif record.kind is RecordKind.OUTPUT:
            counts = decode_output(payload).num_sampled
            for name, count in zip(rows_in_flight.pop(0), counts, strict=True):
                num_sampled[name] += count
    return requests, num_sampled


class _BlockNumbers:
    """Assigns numbers to prefixes of prompts, one per block: equal prefixes get equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        numbers: list[int] = []
        last = -1
        for start in range(0, len(tokens), HASH_BLOCK_TOKENS):
            key = last, tuple(tokens[start : start + HASH_BLOCK_TOKENS])
            last = self._numbers.setdefault(key, len(self._numbers))
            numbers.append(last)
        return tuple(numbers)
