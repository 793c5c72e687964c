"""What an engine's process is started with, and its sockets in a folder of their own.

The folder is its owner's alone (0700), and so is all that lies in it (0600). Depends on no engine.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq

INPUT_SOCKET = "input"
OUTPUT_SOCKET = "output"


class EngineBoot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """config: a `RequestedConfig` as JSON. folder: in which the process binds its sockets."""

    config: str
    folder: str
    heartbeat_s: float


def address(folder: Path, name: str) -> str:
    """Return the address of a socket in the folder."""
    return f"ipc://{folder / name}"


def bind_private(socket: zmq.Socket[bytes], folder: Path, name: str) -> None:
    """Bind a socket in the folder; nobody but its owner may open it."""
    before = os.umask(0o177)
    try:
        socket.bind(address(folder, name))
    finally:
        os.umask(before)
