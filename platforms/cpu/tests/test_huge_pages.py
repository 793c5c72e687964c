"""Mapped packed weights are moved to huge pages with the same content at the same addresses."""

import mmap
import os
import resource
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

pytest.importorskip("dovetail_cpu_kernels")
from dovetail_cpu.linear_kernel import address_of
from dovetail_cpu.packed_cache import huge_pages
from dovetail_cpu.packed_cache.huge_pages import HUGE_PAGE_BYTES, HugePageMover, can_move

pytestmark = pytest.mark.skipif(not can_move(4 * HUGE_PAGE_BYTES), reason="no huge pages here")
NUM_BYTES = 40 * HUGE_PAGE_BYTES + 12345  # more than one piece


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 20) * (NUM_BYTES // (1 << 20)) + os.urandom(12345))
    return path


@pytest.fixture
def mapped(path):
    with path.open("rb") as file:
        size = path.stat().st_size
        return memoryview(
            mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        )


def moved(mapped, monkeypatch):
    monkeypatch.setattr(huge_pages, "DELAY_S", 0.0)
    mover = HugePageMover(mapped)
    mover._thread.join()
    return mover


def num_mapped(path):
    """Return the number of bytes of the file that are mapped."""
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            first, _, end = line.split()[0].partition("-")
            count += int(end, 16) - int(first, 16)
    return count


def test_the_weights_are_moved_with_the_same_content_and_address(mapped, path, monkeypatch):
    address, content = address_of(mapped), path.read_bytes()
    mover = moved(mapped, monkeypatch)
    assert mapped == content and address_of(mapped) == address
    assert len(mapped) - 2 * HUGE_PAGE_BYTES < mover.num_moved <= len(mapped)
    assert mover.num_moved % HUGE_PAGE_BYTES == 0
    assert num_mapped(path) < 2 * HUGE_PAGE_BYTES + mmap.PAGESIZE


def test_the_memory_is_freed_with_the_mapping(path, monkeypatch):
    def status(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10

    size = path.stat().st_size
    before = status("VmSize")
    with path.open("rb") as file:
        mapped = memoryview(
            mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        )
    moved(mapped, monkeypatch)
    assert status("VmSize") > before + size // 2
    del mapped
    assert status("VmSize") < before + size // 2
    assert num_mapped(path) == 0


def test_threads_that_read_the_weights_meanwhile_see_the_same_content(mapped, monkeypatch):
    expected, errors, is_over = zlib.crc32(mapped), [], threading.Event()

    def read():
        while not is_over.is_set():
            if zlib.crc32(mapped) != expected:
                errors.append("other content")

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert moved(mapped, monkeypatch).num_moved
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors and zlib.crc32(mapped) == expected


def test_a_mover_that_is_stopped_ends_immediately(mapped, monkeypatch):
    monkeypatch.setattr(huge_pages, "DELAY_S", 60.0)
    start = time.monotonic()
    mover = HugePageMover(mapped)
    mover.stop()
    assert mover.num_moved == 0 and time.monotonic() - start < 10


def test_the_weights_stay_mapped_if_the_move_fails(mapped, path, monkeypatch):
    call = huge_pages._call
    for name in ("mmap", "mremap"):

        def fail(asked, types, *arguments, name=name):
            return huge_pages._FAILED if asked == name else call(asked, types, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(huge_pages, "_call", fail)
            assert moved(mapped, patched).num_moved == 0
        assert mapped == path.read_bytes() and num_mapped(path) >= NUM_BYTES


def test_weights_are_moved_only_with_huge_pages_and_enough_memory(monkeypatch, tmp_path):
    setting = tmp_path / "setting"
    size = 4 * HUGE_PAGE_BYTES
    assert not can_move(HUGE_PAGE_BYTES - 1)
    for text, expected in (
        ("[always] madvise never", True),
        ("always [madvise] never", True),
        ("always madvise [never]", False),
        ("", False),
    ):
        setting.write_text(text)
        monkeypatch.setattr(huge_pages, "SETTING", setting)
        assert can_move(size) == expected
    setting.write_text("[always]")
    (tmp_path / "statm").write_text(f"9999999 {size // mmap.PAGESIZE} 9999999")
    monkeypatch.setattr(huge_pages, "STATISTICS", tmp_path / "statm")
    for memory, expected in (
        ({"available": 2 * size, "limit": 3 * size}, True),
        ({"available": 8 * size, "limit": 3 * size - 1}, False),
        ({"available": 2 * size}, True),
        ({"available": 2 * size - 1}, False),
        ({}, False),
    ):
        monkeypatch.setattr(huge_pages, "read_memory", lambda memory=memory: memory)
        assert can_move(size) == expected


LIMITED = """
import mmap, resource, sys
from dovetail_cpu.packed_cache import huge_pages

with open(sys.argv[1], "rb") as file:
    mapped = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
huge_pages.DELAY_S = 0.0
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
mover = huge_pages.HugePageMover(mapped)
mover._thread.join()
print(mover.num_moved, bytes(mapped[:16]).hex())
"""


@pytest.mark.costly
def test_a_limit_of_the_address_space_leaves_the_weights_mapped(path):
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    command = [sys.executable, "-c", LIMITED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", path.read_bytes()[:16].hex()]
