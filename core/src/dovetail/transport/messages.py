"""The messages between a front end and an engine core in another process.

Every message is a msgpack struct, after two marker bytes and a version byte. A reader accepts only
the message types of its direction, limits the length of messages, and counts rejected messages.
Operations are sent as names, values as plain data; received data is never executed. This module
does not depend on sockets or the engine.
"""

from __future__ import annotations

from array import array
from typing import Any, Generic, TypeVar

import msgspec

from dovetail.errors import MessageError
from dovetail.interfaces.scheduler import EngineCoreOutputs, Finished, PauseScope, SchedulerStats
from dovetail.interfaces.worker import ModelInfo
from dovetail.transport.columns import check_lengths, counts32
from dovetail.transport.remote_error import RemoteError
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

WIRE_VERSION = 2
MAX_MESSAGE_BYTES = 64 << 20
_MARK = b"DV" + bytes((WIRE_VERSION,))

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base class of all messages: immutable, encoded as the tag and the fields in order."""


class Hello(Message, frozen=True, tag="hello"):
    """A new front end sends this message until the engine responds with `Ready`."""


class Call(Message, frozen=True, tag="call"):
    """Calls an operation of the engine.

    number: the response has the same number; 0 for a call without a response. arguments: the
    arguments as msgpack; the operation declares their types, and they are decoded and checked
    separately.
    """

    number: int
    operation: str
    arguments: bytes


class Taken(Message, frozen=True, tag="taken"):
    """The number of `Outputs` messages that the front end has received since its last `Taken`."""

    num_messages: int


class Detach(Message, frozen=True, tag="detach"):
    """The front end disconnects: its requests are aborted. Other front ends continue."""


class Stop(Message, frozen=True, tag="stop"):
    """Shuts the engine down. Unfinished requests end. Only the owner may send this message."""


class Ready(Message, frozen=True, tag="ready"):
    """The engine has started.

    config: the resolved configuration, as JSON. front_end: the number of the front end that
    receives this message; 0 for the engine's owner. phases, cache_bytes: see `EngineFacts`.
    """

    pid: int
    config: str
    model_info: ModelInfo
    max_model_len: int
    front_end: int = 0
    phases: tuple[tuple[str, float, int], ...] = ()
    cache_bytes: int = 0


class Answer(Message, frozen=True, tag="answer"):
    """The response to an engine call.

    number: the number of the call. result: the result as msgpack; the operation declares its type.
    error: the error, or None.
    """

    number: int
    result: bytes = b""
    error: RemoteError | None = None


class Outputs(Message, frozen=True, tag="outputs"):
    """The outputs of one step: `EngineCoreOutputs` as columns of bytes.

    responses: responses to calls that added requests of which at least one ran in this step.
    """

    request_ids: list[str]
    num_new_tokens: bytes
    token_ids: bytes
    finished: tuple[Finished, ...]
    logprobs: dict[str, WireLogprobs]
    prompt_logprobs: dict[str, WireLogprobs]
    num_cached_tokens: dict[str, int]
    admitted_ns: dict[str, int]
    stats: SchedulerStats | None
    responses: tuple[Answer, ...] = ()
    pooled: dict[str, WirePooled] = {}

    @classmethod
    def of(cls, outputs: EngineCoreOutputs, replies: tuple[Answer, ...] = ()) -> Outputs:
        """Return the message for a step's outputs."""
        return cls(
            request_ids=outputs.request_ids,
            num_new_tokens=outputs.num_new_tokens.tobytes(),
            token_ids=outputs.token_ids.tobytes(),
            finished=outputs.finished,
            logprobs=wire_logprobs(outputs.logprobs),
            prompt_logprobs=wire_logprobs(outputs.prompt_logprobs),
            num_cached_tokens=dict(outputs.num_cached_tokens),
            admitted_ns=dict(outputs.admitted_ns),
            stats=outputs.stats,
            responses=replies,
            pooled=wire_pooled(outputs.pooled),
        )

    def columns(self) -> EngineCoreOutputs:
        """Return the outputs. Raise MessageError if the columns are inconsistent."""
        num_new_tokens: array[int] = counts32(self.num_new_tokens, "num_new_tokens")
        token_ids = counts32(self.token_ids, "token_ids")
        check_lengths(len(self.request_ids), num_new_tokens=num_new_tokens)
        check_lengths(sum(num_new_tokens), token_ids=token_ids)
        return EngineCoreOutputs(
            request_ids=self.request_ids,
            num_new_tokens=num_new_tokens,
            token_ids=token_ids,
            finished=self.finished,
            logprobs=read_logprobs(self.logprobs),
            prompt_logprobs=read_logprobs(self.prompt_logprobs),
            num_cached_tokens=self.num_cached_tokens,
            admitted_ns=self.admitted_ns,
            stats=self.stats,
            pooled=read_pooled(self.pooled),
        )


class Failed(Message, frozen=True, tag="died"):
    """The engine has failed, or no longer serves this front end."""

    error: RemoteError


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """The engine's loop is running.

    This message is sent every second and when a pause or a sleep begins or ends.
    num_steps, num_rejected: executed steps and rejected messages so far. paused: scope, or None.
    asleep: level and tags of `EngineCore.asleep`, or None.
    """

    num_steps: int
    num_rejected: int
    paused: PauseScope | None = None
    asleep: tuple[int, tuple[str, ...]] | None = None


ToEngine = Hello | Call | Taken | Detach | Stop
FromEngine = Ready | Outputs | Answer | Failed | Heartbeat


def pack(message: Message) -> bytes:
    """Encode a message. Raise MessageError if it is too long or not plain data."""
    content = _MARK + encode(message)
    if len(content) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"a message of type {type(message).__name__} has {len(content)} bytes; the limit is "
            f"{MAX_MESSAGE_BYTES}."
        )
    return content


class MessageReader(Generic[M]):
    """Decodes the messages of one direction. num_rejected: number of invalid messages."""

    def __init__(self, kinds: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Create a reader. kinds: the union of the message types, `ToEngine` or `FromEngine`."""
        self.num_rejected = 0
        self._kinds = kinds
        self._max_bytes = max_bytes

    def read(self, content: bytes) -> M:
        """Decode a message. If it is not valid, count it and raise MessageError."""
        try:
            return self._read(content)
        except MessageError:
            self.num_rejected += 1
            raise

    def reject(self, reason: str) -> MessageError:
        """Count a message that was decoded but must not be sent now. Return the error to raise."""
        self.num_rejected += 1
        return MessageError(reason)

    def _read(self, content: bytes) -> M:
        if len(content) > self._max_bytes:
            raise MessageError(
                f"a message has {len(content)} bytes; the limit is {self._max_bytes}."
            )
        if content[: len(_MARK)] != _MARK:
            raise MessageError(
                f"a message begins with {content[:3].hex()} instead of {_MARK.hex()}: it is not a "
                f"message of Dovetail, or not of version {WIRE_VERSION}."
            )
        message: M = decode(memoryview(content)[len(_MARK) :], self._kinds)
        return message


def engine_reader() -> MessageReader[ToEngine]:
    """Return a reader of the front ends' messages."""
    return MessageReader(ToEngine)


def front_end_reader() -> MessageReader[FromEngine]:
    """Return a reader of the engine's messages."""
    return MessageReader(FromEngine)
