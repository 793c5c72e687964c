"""`dovetail collect-env`: prints facts about this machine for a bug report.

This module imports no tensor library: versions are read from metadata, devices from their vendors'
tools. This module prints no paths, no user or host names and no environment variables.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import distributions

from dovetail.machine import (
    find_compilers,
    find_devices,
    read_cores,
    read_memory,
    read_system_file,
)

Section = tuple[str, list[tuple[str, str]]]

_LIBRARIES = ("numpy", "safetensors", "tokenizers", "torch", "transformers", "triton", "vllm")
# fmt: off
_CPU_FLAGS = frozenset((
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp",
    "bf16", "i8mm", "sve", "sve2", "sme",
))
# fmt: on


def collect_env() -> int:
    """Print facts about this machine for a bug report."""
    for title, rows in (_software(), _system(), _processor(), _memory(), _tools()):
        print(title)
        width = max(len(name) for name, _ in rows) + 1
        for name, value in rows:
            print(f"  {f'{name}:':<{width}} {value}")
    return 0


def _software() -> Section:
    versions: dict[str, str] = {}
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        is_member = name == "dovetail" or name.startswith("dovetail-")
        if is_member or name in _LIBRARIES:
            versions.setdefault(name, distribution.version)
    members = sorted(name for name in versions if name.startswith("dovetail"))
    rows = [(name, versions[name]) for name in members] or [("dovetail", "not installed")]
    rows += [(name, versions.get(name, "not installed")) for name in _LIBRARIES]
    return "Software", rows


def _system() -> Section:
    return "System", [
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("virtual environment", "yes" if sys.prefix != sys.base_prefix else "no"),
        ("OS", _os_name()),
        ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("C library", " ".join(platform.libc_ver()).strip() or "unknown"),
    ]


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.platform(aliased=True, terse=True)


def _processor() -> Section:
    info: dict[str, str] = {}
    for line in read_system_file("/proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            info.setdefault(key.strip().lower(), value.strip())
    flags = (info.get("flags") or info.get("features") or "").split()
    present = sorted(_CPU_FLAGS.intersection(flags))
    model = info.get("model name") or platform.processor() or platform.machine()
    cores = read_cores()
    rows = [
        ("model", model),
        ("flags", " ".join(present) or "unknown"),
        ("cores", f"{cores.logical} logical, {cores.usable} usable by this process"),
    ]
    if cores.quota is not None:
        rows.append(("quota", f"{cores.quota:g} cores"))
    return "CPU", rows


def _memory() -> Section:
    rows = [(name, _gib(num_bytes)) for name, num_bytes in read_memory().items()]
    return "Memory", rows or [("total", "unknown")]


def _tools() -> Section:
    rows = find_compilers() or [("C++ compiler", "none found")]
    devices = find_devices() or [("GPU", "none reported by the vendors' tools")]
    return "Tools and devices", rows + devices


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
