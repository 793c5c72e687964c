"""Messages between the main process and its API processes: one JSON object in each packet."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from dovetail.transport.packets import receive_packet, send_packet

MAX_BYTES = 1 << 16


class Start(msgspec.Struct, frozen=True):
    """The data that an API process needs: settings, the model's name, and inherited descriptors.

    replaces_another: whether the process replaces an API process that has exited.
    """

    settings: dict[str, Any]
    served_model_name: str
    control: int
    public: int
    admin: int | None = None
    replaces_another: bool = False


class EngineEvent(msgspec.Struct, frozen=True, tag="engine"):
    """The state of the engine.

    address: the address of its socket. problem: the result of `EngineSlot.problem`.
    """

    address: str
    problem: str


class DrainNow(msgspec.Struct, frozen=True, tag="drain"):
    """Tells an API process to start the drain. A second message aborts its requests."""


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The API process is attached to the engine and serves requests."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The API process has drained. complete: whether no request was aborted."""

    complete: bool


class Question(msgspec.Struct, frozen=True, tag="question"):
    """Asks all other API processes to abort requests, or to count their running requests.

    ids: the requests to abort. everything: whether to abort all requests. counts: whether to count
    running requests instead.
    """

    number: int
    ids: list[str]
    everything: bool
    counts: bool = False


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The response to the question with this number: the number of aborted or running requests."""

    number: int
    count: int


Message = EngineEvent | DrainNow | Serving | Ended | Question | Answer

_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def send(channel: socket.socket, message: Message) -> None:
    """Send a message. Do nothing if the other process has ended or does not read."""
    try:
        send_packet(channel, msgspec.json.encode(message))
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return


def receive(channel: socket.socket) -> Message | None:
    """Return the next message or None. Raises EOFError if the other process closed the socket."""
    try:
        packet, _ = receive_packet(channel, MAX_BYTES)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        packet = b""
    if not packet:
        raise EOFError
    return _DECODER.decode(packet)
