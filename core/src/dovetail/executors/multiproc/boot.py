"""What a worker's process and its executor agree on before there are orders.

Down goes one `Boot`, in memory that has no name; up come `Hello`, `Phase`s, and `Serving` or
`Failed`, over the lifeline: a socket by whose end the worker's process notices that the executor's
is gone. Knows no worker.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Literal, get_args

import msgspec

from dovetail.config.frozen_mapping import freeze
from dovetail.errors import MessageError
from dovetail.plugins.resolution import Resolution
from dovetail.transport.ring_memory import anonymous_file
from dovetail.transport.told_error import ToldError
from dovetail.transport.wire_types import decode, encode

MAX_MESSAGE_BYTES = 1 << 20
_NUM_DESCRIPTORS = 2


class Boot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a worker's process is started with.

    config: an `EngineConfig` as JSON. platform, worker: references for a plugin registry.
    folder: to be removed with the executor; "" for none. descriptors: of the lifeline, the order
    ring's memory and bell, and the pulses' memory. sys_path: the executor's own.
    """

    config: str
    platform: str
    worker: str
    worker_options: dict[str, Any]
    rank: int
    world_size: int
    rendezvous: str
    folder: str
    descriptors: tuple[int, int, int, int]
    sys_path: list[str]


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The process runs. With it come the descriptors of the ring that it answers over."""


PhaseName = Literal["start", "plugins", "worker_cls", "init_device", "load_model"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
"""What a worker's process does before it serves, in order."""


class Phase(msgspec.Struct, frozen=True, tag="phase", forbid_unknown_fields=True):
    """What the process is about to do."""

    name: PhaseName


class Serving(msgspec.Struct, frozen=True, tag="serving", forbid_unknown_fields=True):
    """The model is loaded. resolutions: every plugin that the process has loaded.

    Of options only their representations travel, which is enough to compare them.
    """

    resolutions: list[dict[str, Any]]

    @classmethod
    def of(cls, resolutions: Sequence[Resolution]) -> Serving:
        """Return the message for a registry's resolutions."""
        return cls([_told(one) for one in resolutions])

    def loaded(self) -> tuple[Resolution, ...]:
        """Return the resolutions; raise MessageError if they are none."""
        try:
            return tuple(_heard(one) for one in self.resolutions)
        except TypeError as error:
            raise MessageError(f"a worker told of what is no resolution: {error}") from None


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The process cannot go on, and ends."""

    error: ToldError


FromWorker = Hello | Phase | Serving | Failed


def write_boot(boot: Boot) -> int:
    """Return the descriptor of memory that holds `boot`; the caller closes it."""
    content = encode(boot)
    descriptor = anonymous_file(len(content))
    os.pwrite(descriptor, content, 0)
    return descriptor


def read_boot(descriptor: int) -> Boot:
    """Return what `write_boot` wrote, and close; raise MessageError if it is none."""
    with os.fdopen(descriptor, "rb") as file:
        return decode(file.read(), Boot)


def lifeline_pair() -> tuple[socket.socket, socket.socket]:
    """Return the executor's end and the worker's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def tell(lifeline: socket.socket, message: FromWorker, descriptors: Sequence[int] = ()) -> None:
    """Send a message up the lifeline; do nothing if nobody is there any more."""
    try:
        socket.send_fds(lifeline, [encode(message)], list(descriptors))
    except (BrokenPipeError, ConnectionResetError):
        return


def dismiss(lifeline: socket.socket) -> None:
    """Let a worker's process end by itself; the executor sees to what it has started."""
    with suppress(OSError):
        lifeline.send(b"!")


def hear(lifeline: socket.socket) -> tuple[FromWorker | None, tuple[int, ...]]:
    """Return the next message and the descriptors with it; None if there is, or comes, no more.

    Does not wait where `lifeline` does not. Raises MessageError for what is no message, with its
    descriptors closed.
    """
    try:
        content, descriptors, _, _ = socket.recv_fds(lifeline, MAX_MESSAGE_BYTES, _NUM_DESCRIPTORS)
    except (BlockingIOError, ConnectionResetError):
        return None, ()
    if not content:
        return None, ()
    try:
        message: FromWorker = decode(content, FromWorker)  # type: ignore[arg-type]  # a union
        if isinstance(message, Hello) is not (len(descriptors) == _NUM_DESCRIPTORS):
            raise MessageError(f"{type(message).__name__} with {len(descriptors)} descriptors.")
    except MessageError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return message, tuple(descriptors)


def _told(one: Resolution) -> dict[str, Any]:
    shown = {name: repr(value) for name, value in one.options.items()}
    return {name.name: getattr(one, name.name) for name in fields(one)} | {"options": shown}


def _heard(told: dict[str, Any]) -> Resolution:
    """Return a resolution, its lists as the tuples that they were."""
    lists = {name: tuple(told.get(name, ())) for name in ("notes", "roles")}
    return Resolution(**(told | lists | {"options": freeze(told.get("options", {}))}))
