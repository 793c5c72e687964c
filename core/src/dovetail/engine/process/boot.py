"""The settings of an engine's process, and its sockets in a private directory.

Only the owner may access the directory (0700) and its files (0600). This module does not depend on
an engine.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq

INPUT_SOCKET = "input"
OUTPUT_SOCKET = "output"


class EngineBoot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of an engine's process.

    config: a `RequestedConfig` as JSON. folder: where the process binds its sockets.
    """

    config: str
    folder: str
    heartbeat_s: float


def address(folder: Path, name: str) -> str:
    """Return the address of a socket in the directory."""
    return f"ipc://{folder / name}"


def bind_private(socket: zmq.Socket[bytes], folder: Path, name: str) -> None:
    """Bind a socket in the directory. Only its owner may open it."""
    before = os.umask(0o177)
    try:
        socket.bind(address(folder, name))
    finally:
        os.umask(before)
