"""What an engine's process and its parent agree on before they can speak: names, files, sockets.

The folder is its owner's alone (0700), and so is all that lies in it (0600). Knows no engine.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq

from dovetail.errors import ConfigError, MessageError

BOOT_FILE = "boot.json"
INPUT_SOCKET = "input"
OUTPUT_SOCKET = "output"


class Boot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process is started with. config: an `EngineConfig` as JSON. sys_path: the parent's."""

    config: str
    sys_path: list[str]
    heartbeat_s: float


def write_boot(folder: Path, boot: Boot) -> None:
    """Leave `boot` in the folder for the process that is about to start.

    Raises ConfigError, naming the file, where there is no room or leave for it.
    """
    file = folder / BOOT_FILE
    try:
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(boot))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error}): let TMPDIR name a directory with room for it, or "
            "raise the limit on file size (ulimit -f)."
        ) from None


def read_boot(folder: Path) -> Boot:
    """Return what the parent left; raise MessageError if it is none."""
    try:
        return msgspec.json.decode((folder / BOOT_FILE).read_bytes(), type=Boot)
    except msgspec.DecodeError as error:
        raise MessageError(f"{folder / BOOT_FILE} is none of an engine's: {error}") from None


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
