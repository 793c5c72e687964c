"""Memory is distributed over the memory nodes of the CPUs that compute."""

import platform
from pathlib import Path

import pytest

from dovetail_cpu import memory_nodes
from dovetail_cpu.memory_nodes import find_nodes, spread_pages
from dovetail_cpu.native_library import find_library
from dovetail_cpu.native_memory import NativeMemory
from dovetail_cpu.runtime import lazy_zeros

MIB = 1 << 20


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulate four nodes of two CPUs; the process may allocate memory on three of them."""
    for node in range(4):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(f"{node},{node + 4}\n")
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nMems_allowed:\t7\nMems_allowed_list:\t0-1,2\n")
    monkeypatch.setattr(memory_nodes, "_NODE_FOLDER", tmp_path)
    monkeypatch.setattr(memory_nodes, "_STATUS", status)


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [({0, 4}, {0}), ({0, 1}, {0, 1}), (range(8), {0, 1, 2}), ({3, 7}, set()), (set(), set())],
)
def test_only_nodes_of_the_process_are_used(machine, cpus, expected):
    assert find_nodes(frozenset(cpus)) == expected


def test_a_machine_without_nodes_allocates_where_memory_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_nodes, "_NODE_FOLDER", tmp_path / "missing")
    assert not find_nodes(frozenset(range(8)))


@pytest.mark.skipif(
    platform.machine() not in memory_nodes._SYSTEM_CALLS, reason="other system calls"
)
@pytest.mark.parametrize("what", ["cache", "weights"])
def test_weights_and_kv_cache_are_distributed_over_all_nodes(monkeypatch, what):
    if what == "weights" and find_library() is None:
        pytest.skip("no native library")
    calls = []
    monkeypatch.setattr(memory_nodes, "_nodes", lambda: frozenset({0, 70}))
    monkeypatch.setattr(
        memory_nodes, "_system_call", lambda *arguments: calls.append(arguments) or 0
    )
    if what == "cache":
        pages = lazy_zeros(3 * MIB)
        address, num_bytes = pages.data_ptr(), pages.numel()
    else:
        memory = NativeMemory(3 * MIB)
        address, num_bytes = memory.address, memory.num_bytes
    ((_, first, size, mode, _, max_nodes),) = calls
    assert first <= address and first + size >= address + num_bytes
    assert (mode, max_nodes) == (3, 1025)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="no memory nodes")
def test_the_system_accepts_the_call(monkeypatch, caplog):
    """On a machine with one node the pages are distributed over this node."""
    caplog.set_level("INFO")
    monkeypatch.setattr(memory_nodes, "_nodes", lambda: Listed({0}))
    pages = lazy_zeros(3 * MIB)
    pages.fill_(1)
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    assert "not distributed" in caplog.text or any("interleave:0" in line for line in lines)


class Listed(set):
    """Nodes that count as several."""

    def __len__(self):
        return 2


def test_an_error_of_the_system_is_reported(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(memory_nodes, "_nodes", lambda: frozenset({0, 1}))
    monkeypatch.setattr(memory_nodes, "_system_call", lambda *_: 1)
    monkeypatch.setattr(memory_nodes.platform, "machine", lambda: "x86_64")
    spread_pages(0, 4096)
    assert "Operation not permitted" in caplog.text
