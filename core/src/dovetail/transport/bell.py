"""A bell between two processes: to wake the other one, hand it a descriptor, and know of its end.

A pair of unix sockets that keeps packets apart. An end is closed when its last descriptor is, so a
process that dies is noticed at once, whatever it was doing. Linux only. Packets that are no bell's
are refused; a descriptor that comes with one is closed.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from struct import Struct

from dovetail.errors import MessageError, PeerLostError

MAX_PARCELS = 1024
"""Descriptors that may lie unclaimed at an end."""
_RING = b"!"
_PARCEL = Struct("=cQ")
_PARCEL_KIND = b"p"
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Bell:
    """One end. `parcels`: descriptors that came, by number; whoever takes one out closes it."""

    def __init__(self, end: socket.socket) -> None:
        """Own `end`, which is one of `socketpair(AF_UNIX, SOCK_SEQPACKET)`."""
        end.setblocking(False)
        self._socket = end
        self.lost = False
        self.parcels: dict[int, int] = {}

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def ring(self) -> None:
        """Wake the other side if it sleeps; do nothing if it is gone or has rings unheard."""
        try:
            self._socket.send(_RING)
        except BlockingIOError:
            return
        except OSError:
            self.lost = True

    def send_parcel(self, number: int, descriptor: int) -> bool:
        """Hand the other side a descriptor; False if it has to take in others first.

        Raises PeerLostError if it is gone.
        """
        try:
            socket.send_fds(self._socket, [_PARCEL.pack(_PARCEL_KIND, number)], [descriptor])
        except BlockingIOError:
            return False
        except OSError:
            self.lost = True
            raise PeerLostError("the other process has closed its end.") from None
        return True

    def hear(self) -> None:
        """Take in all that has come, without waiting; `lost` tells afterwards of the other's end.

        Raises MessageError for a packet that is no bell's.
        """
        while not self.lost:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._socket, _PARCEL.size + 1, 4)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            self._take(packet, descriptors)

    def _take(self, packet: bytes, descriptors: list[int]) -> None:
        if packet == _RING and not descriptors:
            return
        if not packet and not descriptors:
            self.lost = True
            return
        if len(packet) == _PARCEL.size and packet[:1] == _PARCEL_KIND and len(descriptors) == 1:
            number = _PARCEL.unpack(packet)[1]
            if number not in self.parcels and len(self.parcels) < MAX_PARCELS:
                self.parcels[number] = descriptors[0]
                return
        _close_all(descriptors)
        raise MessageError(
            f"a packet of {len(packet)} bytes and {len(descriptors)} descriptors is none of a "
            f"bell's, or one too many beside {len(self.parcels)}."
        )

    def close(self) -> None:
        """Close this end and what came unasked for. May be called twice.

        The other side notices, though a forked child may hold a copy of this end.
        """
        _close_all(self.parcels.values())
        self.parcels.clear()
        hang_up(self._socket)


class BellRoom:
    """Several ends that one process listens to at once."""

    def __init__(self, bells: Sequence[Bell]) -> None:
        self._bells = bells
        self._poll = select.poll()
        for bell in bells:
            self._poll.register(bell.fileno(), select.POLLIN)
        self._by_descriptor = {bell.fileno(): bell for bell in bells}

    def listen(self, timeout_ms: int) -> None:
        """Sleep until a bell rings or somebody is gone, `timeout_ms` at most; hear all that rang.

        A lost bell is not listened to any more.
        """
        for descriptor, events in self._poll.poll(timeout_ms):
            bell = self._by_descriptor[descriptor]
            bell.hear()
            if bell.lost or events & _GONE:
                bell.lost = True
                self._poll.unregister(descriptor)


def hang_up(end: socket.socket) -> None:
    """Close a socket so that the other side notices, though a fork may hold a copy of this end."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
