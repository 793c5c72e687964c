"""Cores, memory, compilers and devices of this machine, as the system and its tools report them.

Imports no tensor library and caches nothing. Values that the system does not report are None or
empty.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")
_DEVICE_TOOLS = (
    ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--csv"),
    ("xpu-smi", "discovery", "--dump", "2,3,4"),
)
_TOOL_TIMEOUT_S = 10
_MAX_DEVICES = 16
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Numbers of CPU cores: logical cores, cores for this process, and the cgroup's quota."""

    logical: int
    usable: int
    quota: float | None


def read_cores() -> Cores:
    """Return the number of cores of the machine, of this process, and of its cgroup."""
    logical = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quota, _, period = read_system_file("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    known = quota.isdigit() and period.isdigit() and int(period) > 0
    return Cores(logical=logical, usable=usable, quota=int(quota) / int(period) if known else None)


def read_memory() -> Mapping[str, int]:
    """Return bytes by "total", "available", "swap" and, if there is a limit, "limit"."""
    facts: dict[str, int] = {}
    for line in read_system_file("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            facts[key] = int(value.split()[0]) * 1024
    names = {"total": "MemTotal", "available": "MemAvailable", "swap": "SwapTotal"}
    memory = {name: facts[key] for name, key in names.items() if key in facts}
    limit = read_system_file("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES:
        memory["limit"] = int(limit)
    return memory


def read_resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or 0 if it is not known."""
    pages = read_system_file("/proc/self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGESIZE") if len(pages) > 1 else 0


def find_compilers() -> list[tuple[str, str]]:
    """Return (command, version text) of each C++ compiler."""
    told = [(compiler, tool_output(compiler, "--version")) for compiler in _COMPILERS]
    return [(compiler, lines[0]) for compiler, lines in told if lines]


def find_devices() -> list[tuple[str, str]]:
    """Return (tool, line) for each device that a vendor's tool reports."""
    return [(tool[0], line) for tool in _DEVICE_TOOLS for line in tool_output(*tool)[:_MAX_DEVICES]]


def read_system_file(path: str) -> str:
    """Return the text of a system file, or "" if it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def tool_output(command: str, *arguments: str) -> list[str]:
    """Return the output lines of a tool, or [] if it is missing, fails or hangs."""
    path = shutil.which(command)
    if path is None:
        return []
    try:
        done = subprocess.run(
            [path, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines if done.returncode == 0 else []
