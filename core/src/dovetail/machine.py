"""Cores, memory, compilers and devices of this machine, as the system and its tools report them.

This module imports no tensor library and caches nothing. Values that the system does not report are
None or empty.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_COMPILERS = ("c++", "g++", "clang++")
_DEVICE_TOOLS = (
    ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--csv"),
    ("xpu-smi", "discovery", "--dump", "2,3,4"),
)
_TOOL_TIMEOUT_S = 10
_MAX_DEVICES = 16
_NO_LIMIT_BYTES = 1 << 60
"""A cgroup of version 1 without a memory limit reports a limit of at least this many bytes."""
_MAX_DEPTH = 64
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Counts of CPU cores: logical cores, cores for this process, and the cgroup's quota."""

    logical: int
    usable: int
    quota: float | None


@dataclass(frozen=True, kw_only=True)
class CgroupLimits:
    """The limits of a process on CPU time and memory. A field is None if there is no such limit.

    cpu_quota: seconds of CPU time per second of elapsed time; may be below 1.
    """

    cpu_quota: float | None
    memory_bytes: int | None


def read_cores() -> Cores:
    """Return the number of cores of the machine, of this process, and of its cgroup."""
    logical = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return Cores(logical=logical, usable=usable, quota=read_cgroup_limits().cpu_quota)


def read_memory() -> Mapping[str, int]:
    """Return bytes by "total", "available", "swap" and, if there is a limit, "limit"."""
    sizes: dict[str, int] = {}
    for line in read_system_file("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            sizes[key] = int(value.split()[0]) * 1024
    names = {"total": "MemTotal", "available": "MemAvailable", "swap": "SwapTotal"}
    memory = {name: sizes[key] for name, key in names.items() if key in sizes}
    limit = read_cgroup_limits().memory_bytes
    if limit is not None:
        memory["limit"] = limit
    return memory


def read_cgroup_limits(proc: Path = Path("/proc/self")) -> CgroupLimits:
    """Return the smallest CPU and memory limits among the cgroups of the process.

    These are the cgroup of the process and all its parents, of version 1 and 2. proc: the directory
    of the process in /proc.
    """
    quotas: list[float] = []
    limits: list[int] = []
    for folder in _cgroup_folders(proc):
        words = read_system_file(folder / "cpu.max").strip().split()
        words = words or [
            read_system_file(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdigit() and int(word) > 0 for word in words):
            quotas.append(int(words[0]) / int(words[1]))
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_system_file(folder / name).strip()
            if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
                limits.append(int(text))
    return CgroupLimits(cpu_quota=min(quotas, default=None), memory_bytes=min(limits, default=None))


def read_resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or 0 if it is not known."""
    pages = read_system_file("/proc/self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGESIZE") if len(pages) > 1 else 0


def find_compilers() -> list[tuple[str, str]]:
    """Return (command, version text) of each C++ compiler."""
    versions = [(compiler, tool_output(compiler, "--version")) for compiler in _COMPILERS]
    return [(compiler, lines[0]) for compiler, lines in versions if lines]


def find_devices() -> list[tuple[str, str]]:
    """Return (tool, line) for each device that a vendor's tool reports."""
    return [(tool[0], line) for tool in _DEVICE_TOOLS for line in tool_output(*tool)[:_MAX_DEVICES]]


def read_system_file(path: str | Path) -> str:
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


def _cgroup_folders(proc: Path) -> Iterator[Path]:
    """Yield the process's directory in each mounted hierarchy, and the directories above it."""
    paths = dict(_own_paths(read_system_file(proc / "cgroup").strip()))
    for line in read_system_file(proc / "mountinfo").strip().splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        names = [""] if kind[0] == "cgroup2" else kind[2].split(",")
        own = next((paths[name] for name in names if name in paths), None)
        if own is not None:
            yield from _folders(Path(_unescaped(fields[4])), _unescaped(fields[3]), own)


def _own_paths(text: str) -> Iterator[tuple[str, str]]:
    """Yield (controller, path within its hierarchy). The controller of version 2 is ""."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        yield from ((name, path) for name in names.split(","))


def _folders(mount_point: Path, root: str, own: str) -> Sequence[Path]:
    """Return the paths of the cgroup `own` and its parents. `root` is mounted at `mount_point`."""
    path = PurePosixPath(own)
    if ".." in path.parts or not path.is_relative_to(root):
        return [mount_point]  # the process's cgroup is not below the mounted one
    folder = mount_point / path.relative_to(root)
    return [folder, *folder.parents][: min(_MAX_DEPTH, len(path.relative_to(root).parts) + 1)]


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
