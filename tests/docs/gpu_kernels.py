"""Renders and parses docs/gpu_kernels.md, the page about compiled GPU kernels."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from dovetail_devkit.triton.compiled_kernels import CompiledKernel, KernelCase

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu_kernels.md"
PACKAGES = ("dovetail_attn_triton", "dovetail_ops_triton")

_HEAD = """# GPU kernels, compiled without a GPU

`python tests/docs/record_gpu_kernels.py` writes this page with Triton {version}. Do not edit it.

Each launch variant of each kernel is compiled for NVIDIA (sm_) and AMD (gfx) targets, with the
assembler that Triton includes. The table gives registers per thread, spilled bytes per thread and
shared memory per block. The tests of the two packages that contain the kernels compile all kernels
and check their resource limits. The tests in Triton's interpreter check correctness. The speed of
the kernels is not measured.
"""
_TABLE = """
## {package}

| kernel | target | registers | spilled bytes | shared KiB |
| --- | --- | ---: | ---: | ---: |
"""
_ROW = re.compile(r"^\| (.+?) \| (sm_\d+|gfx\w+) \|", re.MULTILINE)


def cases_of(package: str) -> tuple[KernelCase, ...]:
    """Return all launch variants of a package's kernels."""
    actual: tuple[KernelCase, ...] = import_module(f"{package}.kernel_cases").kernel_cases()
    return actual


def render(created: dict[str, list[CompiledKernel]], version: str) -> str:
    """Return the page."""
    parts = [_HEAD.format(version=version)]
    for package, kernels in created.items():
        parts.append(_TABLE.format(package=package))
        parts += [
            f"| {kernel.name} | {kernel.target} | {kernel.registers} | {kernel.spill_bytes} "
            f"| {kernel.shared_bytes / 1024:.1f} |\n"
            for kernel in kernels
        ]
    return "".join(parts)


def rows_of(text: str) -> list[tuple[str, str]]:
    """Return the kernel name and target of each table row of a page."""
    return _ROW.findall(text)
