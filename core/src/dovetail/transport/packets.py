"""Packets, with descriptors, over a pair of Unix sockets.

Linux has sockets that preserve the boundaries of packets. macOS does not: there a packet is a part
of a stream that begins with the packet's length.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Sequence
from struct import Struct

from dovetail.errors import MessageError

_LENGTH = Struct("=I")
_BUFFER_BYTES = 1 << 18
_REST_TIMEOUT_S = 10.0
"""How long the rest of a packet may take. Senders write packets at once."""
_UNSUPPORTED = (errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT, errno.EPROTOTYPE, errno.EOPNOTSUPP)


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for packets. Raises OSError if no descriptor is left."""
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return pair


def send_packet(end: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a packet, not empty, with copies of descriptors.

    Raises BlockingIOError if nothing was sent because the socket is full, and OSError if the other
    end is closed.
    """
    if end.type != socket.SOCK_STREAM:
        _send_some(end, packet, descriptors)
        return
    whole = memoryview(_LENGTH.pack(len(packet)) + packet)
    num_sent = _send_some(end, whole, descriptors)
    while num_sent < len(whole):
        _wait(end, select.POLLOUT)
        num_sent += end.send(whole[num_sent:])


def receive_packet(
    end: socket.socket, max_bytes: int, max_descriptors: int = 0
) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors, which the caller closes.

    The packet is empty if the other end is closed. Raises BlockingIOError if there is no packet,
    OSError if the connection is broken, and MessageError for a packet of a stream that is longer
    than `max_bytes`; of other packets, only `max_bytes` are returned.
    """
    is_stream = end.type == socket.SOCK_STREAM
    first_bytes = _LENGTH.size if is_stream else max_bytes
    first, descriptors, _, _ = socket.recv_fds(end, first_bytes, max_descriptors)
    if not is_stream or not first:
        return first, descriptors
    try:
        (size,) = _LENGTH.unpack(first + _rest(end, _LENGTH.size - len(first)))
        if not 0 < size <= max_bytes:
            raise MessageError(f"received a packet of {size} bytes; the limit is {max_bytes}.")
        return _rest(end, size), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _send_some(end: socket.socket, content: bytes | memoryview, descriptors: Sequence[int]) -> int:
    if not descriptors:
        return end.send(content)
    return socket.send_fds(end, [content], list(descriptors))


def _rest(end: socket.socket, num_bytes: int) -> bytes:
    """Return exactly the next `num_bytes` bytes of a packet that has begun."""
    parts = bytearray()
    while len(parts) < num_bytes:
        try:
            part = end.recv(num_bytes - len(parts))
        except BlockingIOError:
            _wait(end, select.POLLIN)
            continue
        if not part:
            raise ConnectionResetError("the other end was closed within a packet")
        parts += part
    return bytes(parts)


def _wait(end: socket.socket, event: int) -> None:
    poll = select.poll()
    poll.register(end, event)
    if not poll.poll(1000 * _REST_TIMEOUT_S):
        raise ConnectionResetError("the other end has stopped within a packet")
