"""The ring: all readers get all frames, waits have deadlines, and no resource is left."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from dovetail.errors import MessageError, PeerLostError, TransportError
from dovetail.transport.ring import RingReaderEnd, make_ring
from dovetail.transport.ring_memory import RingMemory, RingShape, anonymous_file

SEED = 20261121
CHILD = Path(__file__).with_name("ring_reader_child.py")


@pytest.fixture
def ring():
    """Return a ring with readers in this process: `ring(num_readers=2, num_slots=4)`."""
    created = []

    def make(**shape):
        writer, reader_ends = make_ring(RingShape(**{"num_readers": 1, "slot_bytes": 64} | shape))
        readers = [end.take(num_spins=3) for end in reader_ends]
        created.extend([writer, *readers])
        return writer, readers

    yield make
    for end in created:
        end.close()


@pytest.fixture
def children():
    """Start readers in child processes that are killed after the test."""
    started = []

    def start(reader_ends, count):
        for end in reader_ends:
            numbers = [str(n) for n in (end.index, *end.descriptors, count)]
            child = subprocess.Popen(
                [sys.executable, str(CHILD), *numbers],
                pass_fds=end.descriptors,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            end.close()
            started.append(child)
        for child in started:
            assert child.stdout.readline() == "ready\n"
        return started

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def open_descriptors():
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("seed", range(SEED, SEED + 30))
def test_every_reader_gets_every_frame_in_order(ring, seed):
    rng = Random(seed)
    num_readers, num_slots = rng.randint(1, 4), rng.randint(1, 5)
    writer, readers = ring(num_readers=num_readers, num_slots=num_slots, slot_bytes=32)
    sent, taken = [], [0] * num_readers
    for _ in range(300):
        actor = rng.randrange(num_readers + 1)
        frame = rng.randbytes(rng.choice((0, 1, 31, 32, 33, 500)))
        if actor == num_readers and len(sent) - min(taken) == num_slots:
            with pytest.raises(TimeoutError):
                writer.send(frame, timeout_s=0)
        elif actor == num_readers:
            writer.send(frame, timeout_s=0)
            sent.append(frame)
        elif taken[actor] < len(sent):
            assert readers[actor].receive(timeout_s=0) == sent[taken[actor]]
            taken[actor] += 1
        else:
            with pytest.raises(TimeoutError):
                readers[actor].receive(timeout_s=0)
        assert writer.num_unread() == tuple(len(sent) - count for count in taken)
    assert len(sent) > 5


def test_frames_of_any_size_can_be_sent_and_received(ring):
    writer, (reader,) = ring(slot_bytes=64, num_slots=2)
    for size in (0, 64, 65, 1 << 22):
        frame = Random(size).randbytes(size)
        writer.send(frame)
        assert reader.receive(timeout_s=1) == frame


@pytest.mark.costly
def test_two_processes_receive_every_frame_of_a_long_stream(children):
    rng, checksum = Random(SEED), 0
    writer, reader_ends = make_ring(RingShape(num_readers=2, num_slots=8, slot_bytes=4096))
    with writer:
        readers = children(reader_ends, 3000)
        for _ in range(3000):
            frame = rng.randbytes(rng.choice((10, 1000, 4096, 5000)))
            checksum = crc32(frame, checksum)
            writer.send(frame)
        assert [child.stdout.readline() for child in readers] == [f"{checksum}\n"] * 2


def test_a_send_times_out_at_its_deadline_and_can_be_repeated(ring):
    writer, (quick, slow) = ring(num_readers=2, num_slots=2)
    writer.send(b"1")
    writer.send(b"2")
    quick.receive(timeout_s=1)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"\(1, 2\)"):
        writer.send(b"3", timeout_s=0.2)
    assert 0.15 < time.monotonic() - start < 2
    slow.receive(timeout_s=1)
    writer.send(b"3", timeout_s=0)
    assert [slow.receive(timeout_s=1) for _ in range(2)] == [b"2", b"3"]


def test_a_ring_is_unusable_after_an_incomplete_send_of_a_long_frame(ring):
    writer, (reader,) = ring(num_slots=1024)
    with pytest.raises(TimeoutError):
        for _ in range(1024):
            writer.send(bytes(65), timeout_s=0.05)
    with pytest.raises(TransportError, match="broken"):
        writer.send(b"")
    assert reader.receive(timeout_s=1) == bytes(65)


def test_sleeping_readers_and_writers_are_woken(ring):
    writer, (reader,) = ring(num_slots=2)
    actual = []

    def read():
        actual.extend(reader.receive(timeout_s=5) for _ in range(400))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(400):
        if number % 50 == 0:
            time.sleep(0.002)
        writer.send(bytes([number % 251]), timeout_s=5)
    thread.join(10)
    assert actual == [bytes([number % 251]) for number in range(400)]


def test_a_receive_times_out_at_its_deadline(ring):
    _, (reader,) = ring()
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        reader.receive(timeout_s=0.1)
    assert 0.09 < time.monotonic() - start < 1


def test_a_reader_receives_frames_sent_before_the_writer_closed(ring):
    writer, (reader,) = ring()
    writer.send(b"last")
    writer.send(bytes(1000))
    writer.close()
    assert reader.receive() == b"last"
    assert reader.receive() == bytes(1000)
    with pytest.raises(PeerLostError):
        reader.receive()
    with pytest.raises(TransportError, match="closed"):
        writer.send(b"more")


@pytest.mark.parametrize("size", [1, 65])
def test_a_send_detects_that_a_reader_has_exited(ring, size):
    writer, (_, closed) = ring(num_readers=2, num_slots=2)
    writer.check_readers()
    closed.close()
    with pytest.raises(PeerLostError, match=r"reader \[1\]"):
        writer.check_readers()
    with pytest.raises(TransportError, match=r"reader \[1\]"):
        writer.send(bytes(size), timeout_s=5)


def test_a_waiting_send_detects_that_its_reader_has_exited(ring):
    writer, (closed,) = ring(num_slots=1)
    writer.send(b"")
    threading.Timer(0.1, closed.close).start()
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="restart its process"):
        writer.send(b"", timeout_s=20)
    assert time.monotonic() - start < 2


def test_a_ring_detects_a_killed_process(children):
    writer, reader_ends = make_ring(RingShape(num_readers=2, num_slots=4, slot_bytes=64))
    with writer:
        _, victim = children(reader_ends, 10**9)
        writer.send(b"hello")
        victim.send_signal(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerLostError, match=r"reader \[1\]"):
            for _ in range(10):
                writer.send(b"frame", timeout_s=20)
        assert time.monotonic() - start < 2


def test_a_send_to_a_stopped_process_times_out_at_its_deadline(children):
    writer, reader_ends = make_ring(RingShape(num_readers=1, num_slots=2, slot_bytes=64))
    with writer:
        (child,) = children(reader_ends, 5)
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            for _ in range(4):
                writer.send(b"frame", timeout_s=0.2)
        child.send_signal(signal.SIGCONT)
        while sum(writer.num_unread()):
            time.sleep(0.01)
        for _ in range(3):
            writer.send(b"frame", timeout_s=5)
        assert child.stdout.readline() == f"{crc32(b'frame' * 5)}\n"


@pytest.mark.costly
def test_closing_a_ring_frees_its_resources(children):
    before = open_descriptors(), sorted(os.listdir("/dev/shm"))
    for number in range(30):
        writer, reader_ends = make_ring(RingShape(num_readers=3, num_slots=4, slot_bytes=64))
        readers = [end.take() for end in reader_ends[:2]]
        reader_ends[2].close()
        for size in (1, 1000, 2000)[: number % 4]:
            if number % 2:
                readers[0].receive(timeout_s=1) if sum(writer.num_unread()[:1]) else None
            try:
                writer.send(bytes(size), timeout_s=0)
            except TransportError:
                break
        for end in (writer, *readers) if number % 3 else (*readers, writer):
            end.close()
            end.close()
    assert (open_descriptors(), sorted(os.listdir("/dev/shm"))) == before


@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_corrupted_ring_memory_is_detected(ring, seed):
    """Every received frame is one that was sent. Otherwise a typed error is raised."""
    rng = Random(seed)
    writer, (reader,) = ring(num_slots=4, slot_bytes=64)
    memory, sent = reader._memory, []
    rejected = False
    for number in range(200):
        frame = rng.randbytes(rng.randint(0, 70))
        try:
            writer.send(frame, timeout_s=0)
            sent.append(frame)
            if number > 20:
                at = rng.choice((4096, 4104, 4160, 4168, rng.randrange(8192, len(memory._bytes))))
                memory._bytes[at : at + 4] = rng.randbytes(4)
            assert reader.receive(timeout_s=0) == sent.pop(0)
        except (TransportError, TimeoutError):
            rejected = True
            break
    assert rejected


@pytest.mark.costly
def test_invalid_wakeup_packets_are_rejected():
    before = open_descriptors()
    for packet, num_descriptors in ((b"hello", 0), (b"!", 1), (b"p" + bytes(8), 0), (bytes(9), 2)):
        writer, (end,) = make_ring(RingShape(num_readers=1))
        evil = socket.socket(fileno=os.dup(writer._wakeups[0].fileno()))
        socket.send_fds(evil, [packet], [0] * num_descriptors)
        evil.close()
        with (
            end.take() as reader,
            writer,
            pytest.raises(MessageError, match="unexpected packet"),
        ):
            reader.receive(timeout_s=1)
    assert open_descriptors() == before


@pytest.mark.costly
def test_attaching_a_reader_to_invalid_memory_is_rejected():
    before = open_descriptors()
    shape = RingShape(num_readers=1, num_slots=2, slot_bytes=64)
    for content, reason in (
        (b"", "0 bytes"),
        (bytes(8192), "not a ring of this version"),
        (bytes(range(20)), "not a ring of this version"),
    ):
        file = anonymous_file(0)
        os.write(file, content)
        with pytest.raises(MessageError, match=reason):
            RingMemory.attach(file)
        os.close(file)
    file = anonymous_file(shape.num_bytes)
    RingMemory.format(file, shape).close()
    os.ftruncate(file, shape.num_bytes - 1)
    with pytest.raises(MessageError, match="its header states"):
        RingMemory.attach(file)
    os.pwrite(file, bytes(4), 8)
    with pytest.raises(MessageError, match="num_slots=0"):
        RingMemory.attach(file)
    os.close(file)
    writer, (end,) = make_ring(shape)
    with writer, pytest.raises(MessageError, match="reader 1 does not exist"):
        RingReaderEnd(index=1, descriptors=end.descriptors).take()
    assert open_descriptors() == before


@pytest.mark.parametrize("shape", [{"num_readers": 0}, {"num_readers": 1, "slot_bytes": 0}])
def test_a_ring_with_invalid_sizes_is_rejected(shape):
    with pytest.raises(ValueError, match="must be between 1"):
        RingShape(**shape)
