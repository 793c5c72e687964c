"""Checks of the environment: Python, torch, a compiler, cores, memory, devices.

Versions come from metadata; nothing is imported. Devices are listed by their vendors' tools;
whether a platform can use one is decided by its probe.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from dovetail.machine import (
    find_compilers,
    find_devices,
    read_cores,
    read_memory,
)
from dovetail.working_directory import working_directory_problem
from dovetail_devkit.doctor.finding import BROKEN, NOTE, OK, WARNING, Finding

OLDEST_TORCH = (2, 11)
LITTLE_BYTES = 1 << 30

_MACHINE = "machine"
_ENVIRONMENT = "environment"
_GIB = 1 << 30


def check_machine() -> Iterator[Finding]:
    """Yield findings on cores, memory, compiler and devices."""
    yield _cores()
    yield _memory()
    compilers = find_compilers()
    if compilers:
        yield Finding(area=_MACHINE, subject="compiler", verdict=OK, text=compilers[0][1])
    else:
        yield Finding(
            area=_MACHINE,
            subject="compiler",
            verdict=NOTE,
            text="no C++ compiler found: native CPU kernels cannot be built; torch's are used",
            remedy="install a compiler, such as g++, then reinstall the packages with kernels",
        )
    devices = find_devices()
    for tool, line in devices:
        yield Finding(area=_MACHINE, subject="device", verdict=OK, text=f"{line} ({tool})")
    if not devices:
        text = "no vendor tool reports an accelerator; models run on the CPU"
        yield Finding(area=_MACHINE, subject="device", verdict=NOTE, text=text)


def check_environment() -> Iterator[Finding]:
    """Yield findings on Python and torch."""
    isolated = "in a virtual environment" if sys.prefix != sys.base_prefix else "system-wide"
    text = f"{platform.python_implementation()} {platform.python_version()}, {isolated}"
    yield Finding(area=_ENVIRONMENT, subject="Python", verdict=OK, text=text)
    yield _torch()
    if problem := working_directory_problem():
        yield Finding(
            area=_ENVIRONMENT,
            subject="working directory",
            verdict=BROKEN,
            text=f"it {problem}; no engine can start in this directory",
            remedy="change to a directory that exists and is accessible",
        )


def _cores() -> Finding:
    cores = read_cores()
    text = f"{cores.usable} of {cores.logical} are available to this process"
    if cores.quota is None or cores.quota >= cores.usable:
        return Finding(area=_MACHINE, subject="cores", verdict=OK, text=text)
    return Finding(
        area=_MACHINE,
        subject="cores",
        verdict=WARNING,
        text=f"{text}, but its control group allows the time of {cores.quota:g}",
        remedy=f"give --num-threads {max(1, int(cores.quota))}; more threads slow each other down",
    )


def _memory() -> Finding:
    memory = read_memory()
    if "available" not in memory:
        text = "this system does not report how much is available"
        return Finding(area=_MACHINE, subject="memory", verdict=NOTE, text=text)
    parts = [f"{memory[name] / _GIB:.1f} GiB {name}" for name in ("total", "available")]
    if "limit" in memory:
        parts.append(f"{memory['limit'] / _GIB:.1f} GiB allowed by the control group")
    text = ", ".join(parts)
    if min(memory["available"], memory.get("limit", memory["available"])) >= LITTLE_BYTES:
        return Finding(area=_MACHINE, subject="memory", verdict=OK, text=text)
    return Finding(
        area=_MACHINE,
        subject="memory",
        verdict=WARNING,
        text=f"{text}: too little for most models",
        remedy="stop other processes, or raise the control group's limit",
    )


def _torch() -> Finding:
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Finding(
            area=_ENVIRONMENT,
            subject="torch",
            verdict=NOTE,
            text="not installed; only plugins that do not need torch can be used",
            remedy="pip install 'dovetail[cpu]'",
        )
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers >= OLDEST_TORCH:
        return Finding(area=_ENVIRONMENT, subject="torch", verdict=OK, text=found)
    oldest = ".".join(map(str, OLDEST_TORCH))
    return Finding(
        area=_ENVIRONMENT,
        subject="torch",
        verdict=WARNING,
        text=f"{found} is older than {oldest}, the oldest version that Dovetail is tested with",
        remedy=f"pip install 'torch>={oldest}'",
    )
