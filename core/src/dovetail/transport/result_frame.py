"""Results as frames, and back: what a worker's process answers to a plan.

Columns as they are; log-probabilities and what a KV connector says are msgpack in one more column,
which is empty in most steps. Whether a result fits its plan is for the scheduler's side to say.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

import msgspec

from dovetail.errors import MessageError
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.transport.columns import (
    check_lengths,
    counts32,
    pack_columns,
    uint8,
    unpack_columns,
)
from dovetail.transport.wire_types import WireLogprobs, decode, encode

RESULT = 2
_NUM_COLUMNS = 4


class _Tail(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    logprobs: dict[int, WireLogprobs]
    prompt_logprobs: dict[int, WireLogprobs]
    kv_transfer: bytes
    errors: dict[int, str]


def encode_result(output: ModelRunnerOutput) -> bytes:
    """Return the frame of a step's result."""
    tail = b""
    if output.logprobs or output.prompt_logprobs or output.kv_transfer or output.errors:
        tail = encode(
            _Tail(
                {run: WireLogprobs.of(columns) for run, columns in output.logprobs.items()},
                {run: WireLogprobs.of(columns) for run, columns in output.prompt_logprobs.items()},
                output.kv_transfer,
                dict(output.errors),
            )
        )
    columns: list[bytes | array[int]] = [
        output.num_sampled,
        output.token_ids,
        output.num_drafts,
        tail,
    ]
    return pack_columns(RESULT, columns, (output.step_id, 0))


def decode_result(frame: bytes) -> ModelRunnerOutput:
    """Return the result of a frame, its columns copied; raise MessageError if it is none."""
    found = unpack_columns(frame, RESULT, least=_NUM_COLUMNS)
    if len(found.columns) != _NUM_COLUMNS or found.numbers[1]:
        raise MessageError(f"a result with {len(found.columns)} columns; it has {_NUM_COLUMNS}.")
    num_sampled = uint8(found.columns[0])
    token_ids = counts32(found.columns[1], "token_ids")
    num_drafts = uint8(found.columns[2])
    check_lengths(sum(num_sampled), token_ids=token_ids)
    if num_drafts:
        check_lengths(len(num_sampled), num_drafts=num_drafts)
    content = found.columns[3]
    tail = decode(content, _Tail) if content else _Tail({}, {}, b"", {})
    _check_runs("errors", tail.errors, len(num_sampled))
    return ModelRunnerOutput(
        step_id=found.numbers[0],
        num_sampled=num_sampled,
        token_ids=token_ids,
        logprobs=_by_run(tail.logprobs, len(num_sampled)),
        prompt_logprobs=_by_run(tail.prompt_logprobs, len(num_sampled)),
        num_drafts=num_drafts,
        kv_transfer=tail.kv_transfer,
        errors=tail.errors,
    )


def _by_run(told: Mapping[int, WireLogprobs], num_runs: int) -> dict[int, LogprobColumns]:
    _check_runs("log-probabilities", told, num_runs)
    return {run: columns.columns() for run, columns in told.items()}


def _check_runs(what: str, runs: Iterable[int], num_runs: int) -> None:
    if any(not 0 <= run < num_runs for run in runs):
        raise MessageError(f"{what} of runs {sorted(runs)}; there are {num_runs}.")
