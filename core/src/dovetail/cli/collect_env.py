"""`dovetail collect-env`: the facts of this machine that an issue needs, as plain text.

Imports no tensor library: versions come from metadata, devices from their vendors' own tools. Tells
no paths, no user or host names and no environment variables.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

Section = tuple[str, list[tuple[str, str]]]

_LIBRARIES = ("numpy", "safetensors", "tokenizers", "torch", "transformers", "triton", "vllm")
# fmt: off
_CPU_FLAGS = frozenset((
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp",
    "bf16", "i8mm", "sve", "sve2", "sme",
))
# fmt: on
_COMPILERS = ("c++", "g++", "clang++")
_DEVICE_TOOLS = (
    ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--csv"),
    ("xpu-smi", "discovery", "--dump", "2,3,4"),
)
_TOOL_TIMEOUT_S = 10
_MAX_DEVICES = 16
_NO_LIMIT_BYTES = 1 << 60


def collect_env() -> int:
    """Describe this machine, to be pasted into an issue."""
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
    facts: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            facts.setdefault(key.strip().lower(), value.strip())
    flags = (facts.get("flags") or facts.get("features") or "").split()
    present = sorted(_CPU_FLAGS.intersection(flags))
    model = facts.get("model name") or platform.processor() or platform.machine()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [
        ("model", model),
        ("flags", " ".join(present) or "unknown"),
        ("cores", f"{os.cpu_count()} logical, {usable} usable by this process"),
    ]
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        rows.append(("quota", f"{int(quota) / int(period):g} cores"))
    return "CPU", rows


def _memory() -> Section:
    facts: dict[str, int] = {}
    for line in _read("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            facts[key] = int(value.split()[0]) * 1024
    names = {"total": "MemTotal", "available": "MemAvailable", "swap": "SwapTotal"}
    rows = [(name, _gib(facts[key])) for name, key in names.items() if key in facts]
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES:
        rows.append(("limit", _gib(int(limit))))
    return "Memory", rows or [("total", "unknown")]


def _tools() -> Section:
    rows = []
    for compiler in _COMPILERS:
        if lines := _output(compiler, "--version"):
            rows.append((compiler, lines[0]))
    if not rows:
        rows.append(("C++ compiler", "none found"))
    devices = [(tool[0], line) for tool in _DEVICE_TOOLS for line in _output(*tool)[:_MAX_DEVICES]]
    return "Tools and devices", rows + (devices or [("GPU", "none that a vendor's tool reports")])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _read(path: str) -> str:
    """Return a system file's text, or "" where this system has none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(command: str, *arguments: str) -> list[str]:
    """Return the lines that a tool prints, or [] if it is not there, fails or hangs."""
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
