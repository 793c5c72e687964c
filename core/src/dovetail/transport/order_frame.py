"""Frames between an executor and a worker process, other than plans and results.

The executor sends requests to sample and calls of operations, with numbers; the worker sends
responses. This module only encodes and decodes frames.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from dovetail.errors import MessageError
from dovetail.interfaces.worker import GrammarOutput
from dovetail.transport.columns import counts32, pack_columns, unpack_columns
from dovetail.transport.remote_error import RemoteError
from dovetail.transport.values import pack_value, unpack_value
from dovetail.transport.wire_types import decode, encode

SAMPLE = 3
CALL = 4
ANSWER = 5
_EVERY_RANK = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCall:
    """A call of an operation. reply_rank: the rank that returns a value, or None for all."""

    number: int
    operation: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reply_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The result of a call of a worker method: `value`, or `error`."""

    number: int
    value: Any = None
    error: RemoteError | None = None


def encode_sample(grammar: GrammarOutput | None) -> bytes:
    """Return the frame that requests sampling for the previous plan.

    grammar: the tokens that may be sampled; None for any.
    """
    if grammar is None:
        return pack_columns(SAMPLE, (b"", b""), (0, 0))
    return pack_columns(SAMPLE, (array("i", grammar.runs), grammar.bitmask), (1, 0))


def decode_sample(frame: bytes) -> GrammarOutput | None:
    """Return the allowed tokens in a frame of `encode_sample`, or None if any may be sampled.

    Raises MessageError if the frame is not valid.
    """
    columns = unpack_columns(frame, SAMPLE, minimum=2)
    if not columns.numbers[0]:
        return None
    return GrammarOutput(
        runs=tuple(counts32(columns.columns[0], "runs")), bitmask=bytes(columns.columns[1])
    )


def encode_call(call: WorkerCall) -> bytes:
    """Return the frame of a call. Raise MessageError if an argument cannot be sent."""
    content = pack_value((call.operation, list(call.args), dict(call.kwargs)))
    rank = _EVERY_RANK if call.reply_rank is None else call.reply_rank
    return pack_columns(CALL, (content,), (call.number, rank))


def decode_call(frame: bytes) -> WorkerCall:
    """Decode the call in a frame. Raise MessageError if the frame is not a valid call."""
    columns = unpack_columns(frame, CALL, minimum=1)
    parts = unpack_value(columns.columns[0])
    if not isinstance(parts, list) or [type(part) for part in parts] != [str, list, dict]:
        raise MessageError("A call must contain an operation, arguments and keyword arguments.")
    number, rank = columns.numbers
    return WorkerCall(
        number=number,
        operation=parts[0],
        args=parts[1],
        kwargs=parts[2],
        reply_rank=None if rank == _EVERY_RANK else rank,
    )


def encode_call_result(result: CallResult) -> bytes:
    """Return the frame of a response. Raise MessageError if its value cannot be sent."""
    if result.error is not None:
        return pack_columns(ANSWER, (encode(astuple(result.error)),), (result.number, 1))
    return pack_columns(ANSWER, (pack_value(result.value),), (result.number, 0))


def decode_call_result(frame: bytes) -> CallResult:
    """Decode the response in a frame. Raise MessageError if the frame is not a valid response."""
    columns = unpack_columns(frame, ANSWER, minimum=1)
    number, failed = columns.numbers
    if failed:
        error = RemoteError(*decode(columns.columns[0], tuple[str, str, str]))
        return CallResult(number=number, error=error)
    return CallResult(number=number, value=unpack_value(columns.columns[0]))
