"""Distributes memory over the memory nodes (NUMA) of the cores that compute.

Otherwise all pages would be on the node of the thread that writes them first, and threads of other
nodes would share the bandwidth of that node. This module does not import torch, because
`dovetail.processes.affinity` reads the affinity mask before torch is imported.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Set
from functools import cache
from pathlib import Path

from dovetail.machine import read_system_file
from dovetail.processes.affinity import allowed_cpus

logger = logging.getLogger(__name__)

_NODE_FOLDER = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")
_SYSTEM_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""The numbers of the system calls `mbind` and `get_mempolicy`, by architecture."""
_DEFAULT_POLICY, _INTERLEAVE = 0, 3
_MAX_NODES = 1024


def spread_pages(address: int, num_bytes: int) -> None:
    """Distribute pages that are not allocated yet evenly over the nodes.

    address: aligned to a page. Does nothing if there is only one node, if the process has its own
    policy (numactl), or if the system does not permit it.
    """
    nodes = _nodes()
    if len(nodes) < 2:
        return
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    mbind, _ = _SYSTEM_CALLS[platform.machine()]
    failed = _system_call(
        mbind, address, num_bytes, _INTERLEAVE, ctypes.addressof(mask), _MAX_NODES + 1
    )
    if failed:
        logger.info("Pages are not distributed over memory nodes: %s.", os.strerror(failed))


def find_nodes(cpus: Set[int]) -> Set[int]:
    """Return the nodes that have some of `cpus` and on which the process may allocate memory."""
    nodes = {
        int(folder.name.removeprefix("node"))
        for folder in _NODE_FOLDER.glob("node[0-9]*")
        if cpus & _parse_list(read_system_file(folder / "cpulist"))
    }
    for line in read_system_file(_STATUS).splitlines():
        if line.startswith("Mems_allowed_list:"):
            nodes &= _parse_list(line.partition(":")[2])
    return frozenset(node for node in nodes if node < _MAX_NODES)


@cache
def _nodes() -> Set[int]:
    """Return the nodes over which to distribute memory; empty if it stays where it is written."""
    is_known = sys.platform == "linux" and platform.machine() in _SYSTEM_CALLS
    if not is_known or not _has_default_policy():
        return frozenset()
    nodes = find_nodes(allowed_cpus())
    if len(nodes) > 1:
        logger.info("Memory is distributed over the nodes %s.", sorted(nodes))
    return nodes


def _has_default_policy() -> bool:
    policy = ctypes.c_int(-1)
    _, get_policy = _SYSTEM_CALLS[platform.machine()]
    failed = _system_call(get_policy, ctypes.addressof(policy), 0, 0, 0, 0)
    return not failed and policy.value == _DEFAULT_POLICY


def _system_call(number: int, *arguments: int) -> int:
    """Make a system call. Return 0 or its error number."""
    values = [ctypes.c_long(value) for value in (number, *arguments, 0)]
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(*values) else 0


def _parse_list(text: str) -> Set[int]:
    """Return the numbers of a list of the system, such as "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
