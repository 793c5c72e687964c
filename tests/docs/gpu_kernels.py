"""Renders and parses docs/gpu_kernels.md, the page about compiled GPU kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from dovetail_devkit.triton.compiled_kernels import CompiledKernel, KernelCase

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu_kernels.md"
PACKAGES = ("dovetail_attn_triton", "dovetail_ops_triton")

_HEAD = """# GPU kernels, compiled without a GPU

`python tests/docs/record_gpu_kernels.py` writes this page with Triton {version}. Do not edit it.

Each launch variant of each kernel is compiled for NVIDIA (sm_) and AMD (gfx) targets, with the
assembler that Triton includes. The table gives registers per thread, spilled bytes per thread,
shared memory per block, and the occupancy: the share of the maximum number of warps of a
multiprocessor (SM or CU) that can be resident at once.
The tests of the two packages that contain the kernels compile all kernels and check their resource
limits. The tests in Triton's interpreter check correctness. The speed of the kernels is not
measured.

## Bytes and FLOPs

This table is a model, not a measurement. Triton's interpreter runs the kernels and counts; the
values are relative to the minimum for the call: each input is read and each result is written once,
and attention computes causal pairs only. "Moved" counts an address once per launch, as if all
repeated reads were cache hits; "requested" counts all loads and stores. Targets: moved at most
1.15, FLOPs at most 1.1.

Prompts of linear attention miss the target. A separate launch computes the values that the programs
of a head share in each chunk of 16 tokens. It stores 144 bytes for each token and head, which the
next launch reads, together with queries and keys. In one launch, each program would compute these
values again, and would need more registers than there are. If the zeros of the triangular matrices
are not stored, the prompt moves 1.3 times the bytes, but its kernel needs 168 instead of 128
registers and spills 8 bytes on sm_90 and sm_100.

| call | launches | needed KiB | moved | requested | FLOPs |
| --- | ---: | ---: | ---: | ---: | ---: |
{traffic}"""
_TABLE = """
## {package}

| kernel | target | registers | spilled bytes | shared KiB | occupancy |
| --- | --- | ---: | ---: | ---: | ---: |
"""
_ROW = re.compile(r"^\| (.+?) \| (sm_\d+|gfx\w+) \|", re.MULTILINE)

_TRAFFIC_ROW = re.compile(
    r"^\| (.+?) \| \d+ \| [\d,]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]*) \|$", re.MULTILINE
)
MAX_MOVED, MAX_PRODUCTS = 1.15, 1.1
EXCEPTIONS = {"linear_attention: prompt of 1,024 tokens": 1.5}
"""Calls that may move more than `MAX_MOVED` times the needed bytes; the page gives the reason."""


def cases_of(package: str) -> tuple[KernelCase, ...]:
    """Return all launch variants of a package's kernels."""
    actual: tuple[KernelCase, ...] = import_module(f"{package}.kernel_cases").kernel_cases()
    return actual


def count_traffic(*names: str) -> list[dict[str, Any]]:
    """Count the named calls of kernel_traffic.py, or all, in a process of Triton's interpreter."""
    script = Path(__file__).with_name("kernel_traffic.py")
    done = subprocess.run(
        [sys.executable, str(script), *names],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    counted: list[dict[str, Any]] = json.loads(done.stdout)
    return counted


def traffic_row(counted: Mapping[str, Any]) -> str:
    """Return the table row of a kernel call."""
    needed = counted["needed_bytes"]
    moved, requested = (counted[f"{what}_bytes"] / needed for what in ("moved", "requested"))
    due = counted["needed_flops"]
    flops = f"{counted['flops'] / due:.2f}" if due else ""
    return (
        f"| {counted['name']} | {counted['launches']} | {needed / 1024:,.0f} | {moved:.2f} "
        f"| {requested:.2f} | {flops} |\n"
    )


def traffic_rows_of(text: str) -> dict[str, tuple[float, float]]:
    """Return moved bytes and flops of each call on a page, 0 for missing flops."""
    rows = _TRAFFIC_ROW.findall(text)
    return {name: (float(moved), float(flops or 0)) for name, moved, flops in rows}


def render(
    created: dict[str, list[CompiledKernel]], traffic: list[dict[str, Any]], version: str
) -> str:
    """Return the page."""
    rows = "".join(map(traffic_row, traffic))
    parts = [_HEAD.format(version=version, traffic=rows)]
    for package, kernels in created.items():
        parts.append(_TABLE.format(package=package))
        parts += [
            f"| {kernel.name} | {kernel.target} | {kernel.registers} | {kernel.spill_bytes} "
            f"| {kernel.shared_bytes / 1024:.1f} | {kernel.occupancy:.0%} |\n"
            for kernel in kernels
        ]
    return "".join(parts)


def rows_of(text: str) -> list[tuple[str, str]]:
    """Return the kernel name and target of each table row of a page."""
    return _ROW.findall(text)
