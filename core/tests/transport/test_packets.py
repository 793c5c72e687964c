"""Packets over sockets that preserve them, and over streams (macOS)."""

import errno
import os
import socket

import pytest

from dovetail.errors import MessageError
from dovetail.transport.packets import packet_pair, receive_packet, send_packet

KINDS = {"packets": socket.SOCK_SEQPACKET, "stream": socket.SOCK_STREAM}


@pytest.fixture(params=KINDS)
def pair(request, monkeypatch):
    make_pair = socket.socketpair

    def refuse(family, kind):
        if kind == socket.SOCK_SEQPACKET and request.param == "stream":
            raise OSError(errno.EPROTONOSUPPORT, "no packet sockets")
        return make_pair(family, kind)

    monkeypatch.setattr(socket, "socketpair", refuse)
    own, other = packet_pair()
    assert own.type == KINDS[request.param]
    with own, other:
        own.setblocking(False)
        yield own, other


def test_packets_keep_their_boundaries_and_descriptors(pair):
    own, other = pair
    file = os.open(os.devnull, os.O_RDONLY)
    packets = [(b"!", 0), (b"x" * 100_000, 1), (b"!", 0), (b"\0\0\0\1", 2)]
    for packet, num_descriptors in packets:
        send_packet(other, packet, [file] * num_descriptors)
    for packet, num_descriptors in packets:
        received, descriptors = receive_packet(own, 1 << 20, 4)
        assert (received, len(descriptors)) == (packet, num_descriptors)
        for descriptor in descriptors:
            assert os.fstat(descriptor).st_rdev == os.fstat(file).st_rdev
            os.close(descriptor)
    os.close(file)
    with pytest.raises(BlockingIOError):
        receive_packet(own, 100)


def test_a_closed_end_is_an_empty_packet_after_the_last_packet(pair):
    own, other = pair
    send_packet(other, b"last")
    other.close()
    assert receive_packet(own, 100) == (b"last", [])
    assert receive_packet(own, 100) == (b"", [])
    with pytest.raises(BrokenPipeError):
        send_packet(own, b"more")


def test_a_full_socket_raises_an_error_before_a_part_of_a_packet_is_sent(pair):
    own, other = pair
    count = 0
    with pytest.raises(BlockingIOError):
        while True:
            send_packet(own, b"!")
            count += 1
    for _ in range(count):
        assert receive_packet(other, 10) == (b"!", [])
    send_packet(own, b"next")
    assert receive_packet(other, 10) == (b"next", [])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\xff\xff\xff\xff", MessageError),
        (b"\0\0\0\0", MessageError),
        (b"\x09", ConnectionResetError),
        (b"\x09\0\0\0part", ConnectionResetError),
    ],
)
def test_invalid_packets_of_a_stream_are_rejected(content, error):
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    before = len(os.listdir("/proc/self/fd"))
    with own, other:
        socket.send_fds(other, [content], [other.fileno()])
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            receive_packet(own, 100, 1)
        assert len(os.listdir("/proc/self/fd")) == before
