"""The page about compiled GPU kernels: which packages have some, and how its table is read."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from dovetail_devkit.triton.compiled_kernels import CompiledKernel, KernelCase

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu_kernels.md"
PACKAGES = ("dovetail_attn_triton", "dovetail_ops_triton")

_HEAD = """# GPU kernels, compiled without a GPU

Made by `python tests/docs/record_gpu_kernels.py` with Triton {version}; do not edit by hand.

Each kernel in each way in which it is launched, compiled for the targets by the assembler that
Triton brings: registers of a thread, bytes that a thread spills, shared memory of a block.
The tests of both packages compile all of them and hold them to their limits. That a kernel compiles
says nothing of what it computes (the interpreter's tests do), nor how fast.
"""
_TABLE = """
## {package}

| kernel | target | registers | spilled bytes | shared KiB |
| --- | --- | ---: | ---: | ---: |
"""
_ROW = re.compile(r"^\| (.+?) \| sm_(\d+) \|", re.MULTILINE)


def cases_of(package: str) -> tuple[KernelCase, ...]:
    """Return a package's kernels in all ways in which they are launched."""
    found: tuple[KernelCase, ...] = import_module(f"{package}.kernel_cases").kernel_cases()
    return found


def render(made: dict[str, list[CompiledKernel]], version: str) -> str:
    """Return the page."""
    parts = [_HEAD.format(version=version)]
    for package, kernels in made.items():
        parts.append(_TABLE.format(package=package))
        parts += [
            f"| {one.name} | sm_{one.capability} | {one.registers} | {one.spill_bytes} "
            f"| {one.shared_bytes / 1024:.1f} |\n"
            for one in kernels
        ]
    return "".join(parts)


def rows_of(text: str) -> list[tuple[str, int]]:
    """Return the name and target of each line of a page."""
    return [(name, int(capability)) for name, capability in _ROW.findall(text)]
