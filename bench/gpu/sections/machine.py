"""Describes this machine: device, driver, versions. Selects the device for the other sections."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dovetail.machine import find_devices, read_cores, read_memory
from gpu.device_parts import STAND_INS
from gpu.report import Report, Task

_PACKAGES = ("dovetail-core", "torch", "triton", "numpy", "transformers")
_ACCELERATORS = ("cuda", "xpu")


def run(task: Task, report: Report) -> None:
    """Report the machine's facts. The device type is "" if the requested device does not exist."""
    report.fact("versions", _versions())
    cores, memory = read_cores(), read_memory()
    report.fact("host", {"cores": cores.usable, "memory_bytes": memory.get("total", 0)})
    for tool, line in find_devices():
        report.note(f"{tool}: {line}")
    report.fact("device", _device(task.device))


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _device(asked: str) -> dict[str, Any]:
    wanted = _ACCELERATORS if asked == "auto" else (asked,)
    for name in wanted:
        if name in STAND_INS:
            return {"type": name, "name": f"no device, but {name}", "memory_bytes": 0}
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            facts = module.get_device_properties(0)
            return {
                "type": name,
                "name": facts.name,
                "memory_bytes": facts.total_memory,
                "capability": ".".join(map(str, _capability(module))),
            }
    return {"type": ""}


def _capability(module: Any) -> tuple[Any, ...]:
    told = module.get_device_capability(0)
    return tuple(told) if isinstance(told, (tuple, list)) else ()
