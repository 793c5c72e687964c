"""Describes this machine: device, driver, versions.

The script selects the device for the other sections.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dovetail.machine import find_devices, read_cores, read_memory
from gpu.device_parts import STAND_INS
from gpu.report import Report, Task

_PACKAGES = (
    "dovetail-core",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "flashinfer-python",
    "flash-attn",
    "vllm",
)
_ACCELERATORS = ("cuda", "rocm", "xpu")
_MODULES = {"rocm": "cuda"}
"""torch's names of devices that it names differently."""


def run(task: Task, report: Report) -> None:
    """Report the machine's properties.

    The device type is "" if the requested device does not exist.
    """
    report.fact("versions", _versions())
    cores, memory = read_cores(), read_memory()
    report.fact("host", {"cores": cores.usable, "memory_bytes": memory.get("total", 0)})
    for tool, line in find_devices():
        report.note(f"{tool}: {line}")
    report.fact("device", _device(task.device))


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return versions


def _device(requested: str) -> dict[str, Any]:
    names = _ACCELERATORS if requested == "auto" else (requested,)
    for name in names:
        if name in STAND_INS:
            return {"type": name, "name": f"no device, but {name}", "memory_bytes": 0}
        module = getattr(torch, _MODULES.get(name, name), None)
        is_other = module is torch.cuda and (name == "rocm") != bool(torch.version.hip)
        if module is not None and not is_other and module.is_available():
            info = module.get_device_properties(0)
            return {
                "type": name,
                "name": info.name,
                "memory_bytes": info.total_memory,
                "capability": ".".join(map(str, _capability(module))),
            }
    return {"type": ""}


def _capability(module: Any) -> tuple[Any, ...]:
    capability = module.get_device_capability(0)
    return tuple(capability) if isinstance(capability, (tuple, list)) else ()
