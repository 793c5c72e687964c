"""Pages are allocated before use, up to the given distance, and keep their contents."""

import ctypes
import threading
import time
from pathlib import Path

import pytest
import torch

from dovetail_cpu import page_supply
from dovetail_cpu.page_supply import PageSupply
from dovetail_cpu.runtime import lazy_zeros

MIB = 1 << 20
NUM_ROWS, ROW_BYTES = 64, MIB
BUFFERS_MIB = 2 * NUM_ROWS * ROW_BYTES // MIB


def resident_mib():
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 // MIB


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition was not met within 60 s"
        time.sleep(0.01)


@pytest.fixture
def buffers():
    return tuple(lazy_zeros(NUM_ROWS * ROW_BYTES).view(NUM_ROWS, -1) for _ in range(2))


@pytest.fixture
def make():
    created = []

    def supply(buffers, ahead_bytes):
        created.append(PageSupply(buffers, ahead_bytes))
        return created[-1]

    yield supply
    for item in created:
        item.close()


@pytest.mark.costly
def test_memory_pages_are_allocated_before_their_kv_cache_blocks_are_used(buffers, make):
    buffers[0][0, 5] = 7
    supply, before = make(buffers, 32 * MIB), resident_mib()
    supply.use(0)
    until(lambda: resident_mib() >= before + 24)
    supply.use(5)  # enough rows beyond row 0 are allocated
    time.sleep(0.05)
    assert resident_mib() < before + 48
    supply.use(20)
    until(lambda: resident_mib() >= before + 56)
    supply.use(NUM_ROWS - 1)
    until(lambda: resident_mib() >= before + BUFFERS_MIB - 8)
    assert int(buffers[0].sum()) == 7 and not buffers[1].any()


def test_no_page_is_allocated_before_use_or_after_close(buffers, make):
    before = resident_mib()
    supply = make(buffers, 1 << 40)
    assert resident_mib() < before + 4
    supply.close()
    supply.close()
    make((), 0).use(0)
    assert resident_mib() < before + 4


def test_an_unsupported_system_allocates_pages_on_first_use(buffers, make, monkeypatch):
    calls = []

    class Rejecting:
        @staticmethod
        def madvise(*about):
            calls.append(about)
            ctypes.set_errno(22)
            return -1

    monkeypatch.setattr(page_supply, "_libc", Rejecting)
    supply = make(buffers, 32 * MIB)
    for row in range(NUM_ROWS):
        supply.use(row)
    until(lambda: supply._thread is not None and not supply._thread.is_alive())
    assert len(calls) == 1
    assert torch.equal(buffers[0], torch.zeros_like(buffers[0]))


def test_without_a_thread_pages_are_allocated_on_first_use(buffers, make, monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    supply = make(buffers, 32 * MIB)
    for row in range(NUM_ROWS):
        supply.use(row)
    supply.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "can't start new thread" in caplog.text


def test_the_page_allocation_thread_calls_no_torch_operation(make):
    """A daemon thread in such an operation aborts the process when the interpreter exits."""
    callers = []

    class Recorded:
        def __init__(self, buffer_NP):
            self._buffer_NP = buffer_NP

        def __len__(self):
            return len(self._buffer_NP)

        def __getattr__(self, name):
            callers.append(threading.current_thread())
            return getattr(self._buffer_NP, name)

        def __getitem__(self, index):
            callers.append(threading.current_thread())
            return self._buffer_NP[index]

    buffer_NP, before = lazy_zeros(32 * MIB).view(32, -1), resident_mib()
    make((Recorded(buffer_NP),), 32 * MIB).use(0)
    until(lambda: resident_mib() >= before + 24)
    assert set(callers) == {threading.main_thread()}
