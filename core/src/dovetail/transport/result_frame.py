"""Encodes a worker's step results as frames, and decodes them.

Columns are sent unchanged; log-probabilities and KV-connector reports are msgpack in one more
column, which is empty in most steps. The scheduler checks whether a result matches its plan.
"""

from __future__ import annotations

from array import array

import msgspec

from dovetail.errors import MessageError
from dovetail.result import ModelRunnerOutput
from dovetail.transport.columns import (
    check_lengths,
    counts32,
    pack_columns,
    uint8,
    unpack_columns,
)
from dovetail.transport.wire_types import (
    WireLogprobs,
    WirePooled,
    decode,
    encode,
    read_logprobs,
    read_pooled,
    wire_logprobs,
    wire_pooled,
)

RESULT = 2
_NUM_COLUMNS = 4


class _Tail(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    logprobs: dict[int, WireLogprobs]
    prompt_logprobs: dict[int, WireLogprobs]
    kv_transfer: bytes
    errors: dict[int, str]
    pooled: dict[int, WirePooled]


def encode_result(output: ModelRunnerOutput) -> bytes:
    """Return the frame of a step's result."""
    tail = b""
    extras = (output.logprobs, output.prompt_logprobs, output.kv_transfer, output.errors)
    if any(extras) or output.pooled:
        tail = encode(
            _Tail(
                wire_logprobs(output.logprobs),
                wire_logprobs(output.prompt_logprobs),
                output.kv_transfer,
                dict(output.errors),
                wire_pooled(output.pooled),
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
    """Decode a result and copy its columns. Raises MessageError if the frame is not valid."""
    columns = unpack_columns(frame, RESULT, minimum=_NUM_COLUMNS)
    if len(columns.columns) != _NUM_COLUMNS or columns.numbers[1]:
        raise MessageError(f"a result has {len(columns.columns)} columns, not {_NUM_COLUMNS}.")
    num_sampled = uint8(columns.columns[0])
    token_ids = counts32(columns.columns[1], "token_ids")
    num_drafts = uint8(columns.columns[2])
    check_lengths(sum(num_sampled), token_ids=token_ids)
    if num_drafts:
        check_lengths(len(num_sampled), num_drafts=num_drafts)
    content = columns.columns[3]
    tail = decode(content, _Tail) if content else _Tail({}, {}, b"", {}, {})
    for runs in (tail.errors, tail.logprobs, tail.prompt_logprobs, tail.pooled):
        if any(not 0 <= run < len(num_sampled) for run in runs):
            raise MessageError(
                f"a result has entries for the scheduled requests {sorted(runs)}, but only "
                f"{len(num_sampled)} requests were scheduled."
            )
    return ModelRunnerOutput(
        step_id=columns.numbers[0],
        num_sampled=num_sampled,
        token_ids=token_ids,
        logprobs=read_logprobs(tail.logprobs),
        prompt_logprobs=read_logprobs(tail.prompt_logprobs),
        num_drafts=num_drafts,
        kv_transfer=tail.kv_transfer,
        errors=tail.errors,
        pooled=read_pooled(tail.pooled),
    )
