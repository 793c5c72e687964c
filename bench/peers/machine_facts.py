"""Describes the machine that produced the results, without names of hosts or users."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def machine_facts() -> dict[str, str]:
    """Return the processor, its instruction sets, cores, memory, Python and the commit."""
    fields = _cpu_fields()
    flags = set(fields.get("flags", "").split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": fields.get("model name", platform.processor() or platform.machine()),
        "instruction sets": " ".join(name for name in INSTRUCTION_SETS if name in flags) or "–",
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "Python": platform.python_version(),
        "commit": _commit(),
    }


def _cpu_fields() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()
