"""Checks the environment: Python, torch, a compiler, cores, memory and devices.

Versions are read from metadata, without imports. Vendor tools list the devices; the probe of a
platform decides whether the platform can use a device.
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
from dovetail.plugins.working_directory import working_directory_problem
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
            text="no C++ compiler was found: native CPU kernels cannot be built, and torch is used",
            remedy="install a compiler, such as g++, then reinstall the packages that contain "
            "native kernels",
        )
    devices = find_devices()
    for tool, line in devices:
        yield Finding(area=_MACHINE, subject="device", verdict=OK, text=f"{line} ({tool})")
    if not devices:
        text = "no vendor tool reports an accelerator; models run on the CPU"
        yield Finding(area=_MACHINE, subject="device", verdict=NOTE, text=text)


def check_environment() -> Iterator[Finding]:
    """Yield findings on Python and torch."""
    folder = "a virtual environment" if sys.prefix != sys.base_prefix else "the system"
    text = f"{platform.python_implementation()} {platform.python_version()} of {folder}"
    yield Finding(area=_ENVIRONMENT, subject="Python", verdict=OK, text=text)
    yield _torch()
    if problem := working_directory_problem():
        yield Finding(
            area=_ENVIRONMENT,
            subject="working directory",
            verdict=BROKEN,
            text=f"the working directory {problem}; an engine cannot start in it",
            remedy="change to a directory that exists and is accessible",
        )


def _cores() -> Finding:
    cores = read_cores()
    text = f"{cores.usable} of {cores.logical} cores are available to this process"
    if cores.quota is None or cores.quota >= cores.usable:
        return Finding(area=_MACHINE, subject="cores", verdict=OK, text=text)
    return Finding(
        area=_MACHINE,
        subject="cores",
        verdict=WARNING,
        text=f"{text}, but the control group limits the CPU time to {cores.quota:g} cores",
        remedy=f"set --num-threads {max(1, int(cores.quota))}; more threads would be slower",
    )


def _memory() -> Finding:
    memory = read_memory()
    if "available" not in memory:
        text = "the system does not report how much memory is available"
        return Finding(area=_MACHINE, subject="memory", verdict=NOTE, text=text)
    parts = [f"{memory[name] / _GIB:.1f} GiB {name}" for name in ("total", "available")]
    if "limit" in memory:
        parts.append(f"the control group limits memory to {memory['limit'] / _GIB:.1f} GiB")
    text = ", ".join(parts)
    if min(memory["available"], memory.get("limit", memory["available"])) >= LITTLE_BYTES:
        return Finding(area=_MACHINE, subject="memory", verdict=OK, text=text)
    return Finding(
        area=_MACHINE,
        subject="memory",
        verdict=WARNING,
        text=f"{text}; most models need more memory",
        remedy="stop other processes, or raise the limit of the control group",
    )


def _torch() -> Finding:
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return Finding(
            area=_ENVIRONMENT,
            subject="torch",
            verdict=NOTE,
            text="torch is not installed; only plugins that do not need torch can be used",
            remedy="pip install 'dovetail[cpu]'",
        )
    numbers = tuple(
        int(part) for part in torch_version.split("+")[0].split(".")[:2] if part.isdigit()
    )
    if numbers >= OLDEST_TORCH:
        return Finding(area=_ENVIRONMENT, subject="torch", verdict=OK, text=torch_version)
    oldest = ".".join(map(str, OLDEST_TORCH))
    return Finding(
        area=_ENVIRONMENT,
        subject="torch",
        verdict=WARNING,
        text=f"torch {torch_version} is older than {oldest}, the oldest supported version",
        remedy=f"pip install 'torch>={oldest}'",
    )
