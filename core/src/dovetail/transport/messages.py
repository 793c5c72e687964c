"""The messages between a front end and the engine core in its own process.

Every message is a struct of its own, in msgpack, behind two bytes that mark it and one that names
the version. A reader knows which messages may come its way, how long they may be, and counts what
it refuses. Operations travel as names, values as plain data; nothing that arrives is executed.
Depends on no socket and no engine.
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
    decode,
    encode,
    read_logprobs,
    wire_logprobs,
)

WIRE_VERSION = 2
MAX_MESSAGE_BYTES = 64 << 20
_MARK = b"DV" + bytes((WIRE_VERSION,))

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What all messages are: immutable, their name first, then their fields in order."""


class Hello(Message, frozen=True, tag="hello"):
    """A front end is here; the engine answers with `Ready`. Repeated until that has come."""


class Call(Message, frozen=True, tag="call"):
    """Call an operation of the engine port.

    number: of the answer; 0 for a call that is not answered. arguments: msgpack, as the operation's
    declaration says; they are read, and refused, by themselves.
    """

    number: int
    operation: str
    arguments: bytes


class Taken(Message, frozen=True, tag="taken"):
    """The front end has taken so many more messages with outputs since its last `Taken`."""

    num_messages: int


class Detach(Message, frozen=True, tag="detach"):
    """The front end leaves: its requests are aborted, all others continue."""


class Stop(Message, frozen=True, tag="stop"):
    """End the engine; requests under way end with it. Only the owner may send this."""


class Ready(Message, frozen=True, tag="ready"):
    """The engine has started. config: the resolved configuration, as JSON.

    front_end: the number of the front end that this is sent to; 0 is the owner.
    """

    pid: int
    config: str
    model_info: ModelInfo
    max_model_len: int
    front_end: int = 0


class Answer(Message, frozen=True, tag="answer"):
    """The answer to a call. result: msgpack, as the operation's declaration says; or an error."""

    number: int
    result: bytes = b""
    error: RemoteError | None = None


class Outputs(Message, frozen=True, tag="outputs"):
    """What one step gave: `EngineCoreOutputs` as columns of bytes.

    answers: to calls that handed requests over, some of which ran in this step.
    """

    request_ids: list[str]
    num_new_tokens: bytes
    token_ids: bytes
    finished: tuple[Finished, ...]
    logprobs: dict[str, WireLogprobs]
    prompt_logprobs: dict[str, WireLogprobs]
    num_cached_tokens: dict[str, int]
    stats: SchedulerStats | None
    answers: tuple[Answer, ...] = ()

    @classmethod
    def of(cls, outputs: EngineCoreOutputs, answers: tuple[Answer, ...] = ()) -> Outputs:
        """Return the message for a step's outputs."""
        return cls(
            request_ids=outputs.request_ids,
            num_new_tokens=outputs.num_new_tokens.tobytes(),
            token_ids=outputs.token_ids.tobytes(),
            finished=outputs.finished,
            logprobs=wire_logprobs(outputs.logprobs),
            prompt_logprobs=wire_logprobs(outputs.prompt_logprobs),
            num_cached_tokens=dict(outputs.num_cached_tokens),
            stats=outputs.stats,
            answers=answers,
        )

    def columns(self) -> EngineCoreOutputs:
        """Return the outputs; raise MessageError if their columns do not fit each other."""
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
            stats=self.stats,
        )


class Died(Message, frozen=True, tag="died"):
    """The engine cannot go on, or no longer serves this front end."""

    error: RemoteError


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """The engine's loop turns. Sent every second, and when a pause begins or ends.

    num_steps, num_refused: steps done and messages refused so far. paused: how far, or None.
    """

    num_steps: int
    num_refused: int
    paused: PauseScope | None = None


ToEngine = Hello | Call | Taken | Detach | Stop
FromEngine = Ready | Outputs | Answer | Died | Heartbeat


def pack(message: Message) -> bytes:
    """Return a message as bytes; raise MessageError if it holds what is not plain data, or much."""
    content = _MARK + encode(message)
    if len(content) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"a {type(message).__name__} of {len(content)} bytes; at most {MAX_MESSAGE_BYTES} go."
        )
    return content


class MessageReader(Generic[M]):
    """Reads the messages that may come one way. num_refused: how many it has refused."""

    def __init__(self, kinds: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """kinds: the union of the messages, `ToEngine` or `FromEngine`."""
        self.num_refused = 0
        self._kinds = kinds
        self._max_bytes = max_bytes

    def read(self, content: bytes) -> M:
        """Return the message; raise MessageError, and count it, for anything else."""
        try:
            return self._read(content)
        except MessageError:
            self.num_refused += 1
            raise

    def refuse(self, reason: str) -> MessageError:
        """Count a message that was read, and cannot be used; return the error for it."""
        self.num_refused += 1
        return MessageError(reason)

    def _read(self, content: bytes) -> M:
        if len(content) > self._max_bytes:
            raise MessageError(f"a message of {len(content)} bytes; {self._max_bytes} are allowed.")
        if content[: len(_MARK)] != _MARK:
            raise MessageError(
                f"a message that begins with {content[:3].hex()} instead of {_MARK.hex()}: it is "
                f"none of Dovetail's, or not of version {WIRE_VERSION}."
            )
        message: M = decode(memoryview(content)[len(_MARK) :], self._kinds)
        return message


def engine_reader() -> MessageReader[ToEngine]:
    """Return a reader of what front ends send."""
    return MessageReader(ToEngine)


def front_end_reader() -> MessageReader[FromEngine]:
    """Return a reader of what the engine sends."""
    return MessageReader(FromEngine)
