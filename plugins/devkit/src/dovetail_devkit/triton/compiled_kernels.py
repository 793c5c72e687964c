"""Compiles Triton kernels ahead of time without a GPU, and checks their resource usage.

A package lists in `kernel_cases()` how its kernels are launched. `check_kernel` compiles each case
for its targets with Triton's assembler, and checks spills and shared memory against limits. It
needs Triton, but no GPU, driver or torch. `interpreted` tests the results of kernels. Compiled
kernels are not cached between runs. Triton is imported within functions.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dovetail_devkit.expectation import expect

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Map of compute capability · 10 to the shared memory of a block (CUDA C++ Guide, table 27)."""

_CACHE = "TRITON_CACHE_DIR"
_WARP_SIZE = 32
_ALIGNMENT = 16
_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One combination of types and constants with which a kernel is launched.

    name: a readable name, unique in its package.
    kernel: a function decorated with `triton.jit`, not interpreted.
    types: type of each run-time argument, such as "*bf16", "*i64", "i32" or "fp32".
    constexprs: value of each compile-time argument; None for a missing pointer.
    unaligned: pointers and integers that may not be divisible by 16. Other arguments are divisible
        by 16, like most addresses and strides that Triton specializes on at run time.
    capabilities: compute capability · 10 of the targets.
    max_spill_bytes: maximum of spilled bytes, stored and loaded, per thread.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constexprs: Mapping[str, object]
    unaligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = (80, 90)
    max_spill_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Resources of a kernel: registers and spilled bytes per thread, shared memory per block."""

    name: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int


def check_kernel(case: KernelCase) -> tuple[CompiledKernel, ...]:
    """Compile `case` for its targets and return the resources for each.

    Raises AssertionError if it does not compile, spills too much or uses more shared memory than a
    block of the target may have.
    """
    return tuple(_check_target(case, capability) for capability in case.capabilities)


def _check_target(case: KernelCase, capability: int) -> CompiledKernel:
    what = f"{case.name}, sm_{capability}"
    try:
        made = compile_kernel(case, capability)
    except Exception as error:
        raise AssertionError(f"{what} does not compile: {error}") from error
    most = SHARED_BYTES[capability]
    expect(
        made.shared_bytes <= most,
        f"{what} uses {made.shared_bytes} bytes of shared memory, but a block of the target has "
        f"{most}",
    )
    expect(
        made.spill_bytes <= case.max_spill_bytes,
        f"{what} spills {made.spill_bytes} bytes with {made.registers} registers, but "
        f"max_spill_bytes is {case.max_spill_bytes}",
    )
    return made


def compile_kernel(case: KernelCase, capability: int) -> CompiledKernel:
    """Compile `case` for one target. Does not catch errors of Triton and its assembler."""
    triton = import_module("triton")
    compiler = import_module("triton.compiler")
    targets = import_module("triton.backends.compiler")
    source = compiler.ASTSource(
        case.kernel,
        _signature(case),
        constexprs=dict(case.constexprs),
        attrs=_hints(case),
    )
    with _no_cache():
        made = triton.compile(
            source,
            target=targets.GPUTarget("cuda", capability, _WARP_SIZE),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    registers, spill_bytes = _assemble(made.asm["ptx"])
    return CompiledKernel(
        name=case.name,
        capability=capability,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=made.metadata.shared,
    )


def _signature(case: KernelCase) -> dict[str, str]:
    """Return the type of every argument, in the kernel's order."""
    names = case.kernel.arg_names
    given = case.types.keys() | case.constexprs.keys()
    expect(
        given == set(names),
        f"{case.name}: the arguments {sorted(given ^ set(names))} are missing or unknown",
    )
    return {name: case.types.get(name, "constexpr") for name in names}


def _hints(case: KernelCase) -> dict[tuple[int], list[list[object]]]:
    """Return the arguments that are divisible by 16, in the compiler's format."""
    return {
        (place,): [["tt.divisibility", _ALIGNMENT]]
        for place, name in enumerate(case.kernel.arg_names)
        if case.types.get(name, "fp").startswith(("*", "i")) and name not in case.unaligned
    }


@contextmanager
def _no_cache() -> Iterator[None]:
    """Set a temporary cache folder for Triton."""
    before = os.environ.get(_CACHE)
    with tempfile.TemporaryDirectory(prefix="dovetail-triton-") as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            os.environ.pop(_CACHE)
            if before is not None:
                os.environ[_CACHE] = before


def _assemble(ptx: str) -> tuple[int, int]:
    """Return registers and spilled bytes from the assembler's verbose output."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="dovetail-ptx-") as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, "utf-8")
        done = subprocess.run(
            [_assembler(), "-v", f"--gpu-name={target}", path, "-o", f"{folder}/cubin"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    told = done.stdout + done.stderr
    registers = re.findall(r"Used (\d+) registers", told)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", told)
    expect(
        len(registers) == 1 and len(spills) == 2,
        f"the output of Triton's assembler cannot be parsed: {told}",
    )
    return int(registers[0]), sum(map(int, spills))


def _assembler() -> str:
    """Return the path of the assembler that Triton includes."""
    folder = Path(str(import_module("triton").__file__)).parent
    return str(folder / "backends" / "nvidia" / "bin" / "ptxas")
