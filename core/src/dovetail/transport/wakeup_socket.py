"""A socket pair between two processes: wakes the other one, passes descriptors, reports exits.

A socket is closed with its last descriptor, so the exit of a process is noticed immediately.
Packets of any other form are rejected, and descriptors that come with them are closed.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from struct import Struct

from dovetail.errors import MessageError, PeerLostError
from dovetail.transport.packets import receive_packet, send_packet

MAX_DESCRIPTORS = 1024
"""Maximum number of received descriptors that the caller has not taken yet."""
_NOTIFICATION = b"!"
_DESCRIPTOR = Struct("=cQ")
_DESCRIPTOR_KIND = b"p"
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class WakeupSocket:
    """One end of the socket pair.

    descriptors: received descriptors, by number; a caller that takes one must close it.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take over `end`, an end of a `packet_pair`."""
        end.setblocking(False)
        self._socket = end
        self.lost = False
        self.descriptors: dict[int, int] = {}

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def notify(self) -> None:
        """Wake the other process. Do nothing if it has exited or has an unread notification."""
        try:
            send_packet(self._socket, _NOTIFICATION)
        except BlockingIOError:
            return
        except OSError:
            self.lost = True

    def send_descriptor(self, number: int, descriptor: int) -> bool:
        """Send a descriptor. Return False if the other process must first receive earlier ones.

        Raises PeerLostError if the other process has exited.
        """
        try:
            packet = _DESCRIPTOR.pack(_DESCRIPTOR_KIND, number)
            send_packet(self._socket, packet, [descriptor])
        except BlockingIOError:
            return False
        except OSError:
            self.lost = True
            raise PeerLostError("the other process has closed its end of the socket.") from None
        return True

    def receive(self) -> None:
        """Receive all packets that have arrived. Set `lost` if the other process has exited.

        Does not wait. Raises MessageError if a packet is neither a notification nor a descriptor.
        """
        while not self.lost:
            try:
                packet, descriptors = receive_packet(self._socket, _DESCRIPTOR.size + 1, 4)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            self._take(packet, descriptors)

    def _take(self, packet: bytes, descriptors: list[int]) -> None:
        if packet == _NOTIFICATION and not descriptors:
            return
        if not packet and not descriptors:
            self.lost = True
            return
        if (
            len(packet) == _DESCRIPTOR.size
            and packet[:1] == _DESCRIPTOR_KIND
            and len(descriptors) == 1
        ):
            number = _DESCRIPTOR.unpack(packet)[1]
            if number not in self.descriptors and len(self.descriptors) < MAX_DESCRIPTORS:
                self.descriptors[number] = descriptors[0]
                return
        _close_all(descriptors)
        raise MessageError(
            f"received an unexpected packet of {len(packet)} bytes with {len(descriptors)} "
            f"descriptors; {len(self.descriptors)} earlier descriptors were not taken yet."
        )

    def close(self) -> None:
        """Close this end and the descriptors that were not taken. May be called twice.

        The other side is notified, even if a forked child has a copy of this end.
        """
        _close_all(self.descriptors.values())
        self.descriptors.clear()
        hang_up(self._socket)


class WakeupPoller:
    """Polls several wakeup sockets of one process together."""

    def __init__(self, wakeups: Sequence[WakeupSocket]) -> None:
        self._wakeups = wakeups
        self._poll = select.poll()
        for wakeup in wakeups:
            self._poll.register(wakeup.fileno(), select.POLLIN)
        self._by_descriptor = {wakeup.fileno(): wakeup for wakeup in wakeups}

    def wait(self, timeout_ms: int) -> None:
        """Wait at most `timeout_ms` for a notification or an exit of another process.

        Receive all packets. A lost socket is not polled any more.
        """
        for descriptor, events in self._poll.poll(timeout_ms):
            wakeup = self._by_descriptor[descriptor]
            wakeup.receive()
            if wakeup.lost or events & _GONE:
                wakeup.lost = True
                self._poll.unregister(descriptor)


def hang_up(end: socket.socket) -> None:
    """Close a socket and notify the other side, even if a forked child has a copy of this end."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
