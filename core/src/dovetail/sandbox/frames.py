"""Frames between a process and its bounded child: a JSON value followed by bytes.

length of the JSON, length of the bytes           two little-endian uint32
JSON                                              UTF-8; lone surrogates are allowed
bytes
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

HEAD = struct.Struct("<II")
_PIECE_BYTES = 1 << 20


class FrameError(Exception):
    """The other side closed the connection or sent a frame that is too large."""


def encode(value: object) -> bytes:
    """Return a JSON value as the content of a frame, a string. Raise the errors of `json.dumps`."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def send_frame(
    connection: socket.socket,
    text: bytes,
    blob: bytes = b"",
    *,
    before_wait: Callable[[], None] | None = None,
) -> None:
    """Send one frame. before_wait: called before each wait, to set the socket's timeout."""
    for part in (HEAD.pack(len(text), len(blob)) + text, blob):
        left = memoryview(part)
        while left:
            if before_wait is not None:
                before_wait()
            left = left[connection.send(left[:_PIECE_BYTES]) :]


def receive_frame(
    connection: socket.socket,
    *,
    max_bytes: int,
    before_wait: Callable[[], None] | None = None,
) -> tuple[Any, bytes]:
    """Return the JSON value and the bytes of the next frame.

    max_bytes: maximum size of the frame. Raises FrameError for a closed connection or a larger
    frame, ValueError for invalid JSON.
    """

    def receive(num_bytes: int) -> bytes:
        pieces: list[bytes] = []
        while num_bytes:
            if before_wait is not None:
                before_wait()
            piece = connection.recv(min(num_bytes, _PIECE_BYTES))
            if not piece:
                raise FrameError("the connection was closed")
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)

    text_bytes, blob_bytes = HEAD.unpack(receive(HEAD.size))
    if text_bytes + blob_bytes > max_bytes:
        raise FrameError(f"the frame has more than {max_bytes} bytes")
    text = receive(text_bytes).decode("utf-8", "surrogatepass")
    return json.loads(text), receive(blob_bytes)
