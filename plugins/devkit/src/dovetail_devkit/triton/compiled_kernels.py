"""Compiles Triton kernels ahead of time without a GPU, and checks their resource usage.

A package lists in `kernel_cases()` how its kernels are launched. `check_kernel` compiles a case
for one of its targets, NVIDIA or AMD, with the assembler that Triton includes, and checks spills
and shared memory against limits. It needs Triton, but no GPU, driver or torch. `interpreted` tests
the results of kernels. Compiled kernels are not cached between runs. Triton is imported within
functions.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from dovetail_devkit.expectation import expect
from dovetail_devkit.triton.occupancy import occupancy

SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
}
"""Map of targets to the shared memory of a thread block.

NVIDIA: "sm_" and compute capability · 10 (CUDA C++ Guide, table 27). AMD: the name of the
architecture (LDS of a workgroup; CDNA 3 Instruction Set Architecture, section 11).
"""

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
"""The targets of a case that names none."""

_CACHE = "TRITON_CACHE_DIR"
_NVIDIA = "sm_"
_WARP_SIZE = 32
_WAVE_SIZE = 64
_FIRST_BLACKWELL = 100
"""The compute capability · 10 from which Triton's second assembler is needed."""
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
    targets: names in `SHARED_BYTES`.
    max_spill_bytes: maximum of spilled bytes, stored and loaded, per thread, by target; 0 for
        targets that are not named.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constexprs: Mapping[str, object]
    unaligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[str, ...] = TARGETS
    max_spill_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Resources of a kernel: registers and spilled bytes per thread, shared memory per block.

    num_warps: warps per block.
    """

    name: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int = 4

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's warps that can be resident at the same time."""
        return occupancy(
            self.target,
            num_warps=self.num_warps,
            registers=self.registers,
            shared_bytes=self.shared_bytes,
        )


def check_kernel(case: KernelCase, target: str) -> CompiledKernel:
    """Compile `case` for `target` and return its resources.

    Raises AssertionError if it does not compile, spills too much or uses more shared memory than
    the target allows per block.
    """
    what = f"{case.name}, {target}"
    try:
        kernel = compile_kernel(case, target)
    except Exception as error:
        raise AssertionError(f"{what} does not compile: {error}") from error
    maximum = SHARED_BYTES[target]
    expect(
        kernel.shared_bytes <= maximum,
        f"{what} uses {kernel.shared_bytes} bytes of shared memory, but the target allows only "
        f"{maximum} bytes per block",
    )
    maximum = case.max_spill_bytes.get(target, 0)
    expect(
        kernel.spill_bytes <= maximum,
        f"{what} spills {kernel.spill_bytes} bytes with {kernel.registers} registers, but "
        f"max_spill_bytes is {maximum}",
    )
    return kernel


def compile_kernel(case: KernelCase, target: str) -> CompiledKernel:
    """Compile `case` for one target. Does not catch errors of Triton and its assembler."""
    triton = import_module("triton")
    compiler = import_module("triton.compiler")
    source = compiler.ASTSource(
        case.kernel,
        _signature(case),
        constexprs=dict(case.constexprs),
        attrs=_hints(case),
    )
    with _no_cache():
        kernel = triton.compile(
            source,
            target=_gpu_target(target),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    is_nvidia = target.startswith(_NVIDIA)
    measured = _assemble(kernel.asm["ptx"]) if is_nvidia else _read_metadata(kernel.asm["amdgcn"])
    return CompiledKernel(
        name=case.name,
        target=target,
        registers=measured[0],
        spill_bytes=measured[1],
        shared_bytes=kernel.metadata.shared,
        num_warps=case.num_warps,
    )


def _gpu_target(target: str) -> Any:
    targets = import_module("triton.backends.compiler")
    if target.startswith(_NVIDIA):
        return targets.GPUTarget("cuda", int(target.removeprefix(_NVIDIA)), _WARP_SIZE)
    return targets.GPUTarget("hip", target, _WAVE_SIZE)


def _read_metadata(assembly: str) -> tuple[int, int]:
    """Return registers and spilled bytes per thread from the metadata of an AMD kernel.

    Accumulator registers count as registers. Scalar registers that are spilled to vector registers
    use no memory and do not count as spilled.
    """
    metadata = dict(re.findall(r"^\s+\.(\w+):\s+(\d+)$", assembly, re.MULTILINE))
    names = ("vgpr_count", "private_segment_fixed_size")
    expect(
        metadata.keys() >= set(names),
        f"the metadata of the AMD kernel cannot be parsed: {metadata}",
    )
    registers, scratch_bytes = (int(metadata[name]) for name in names)
    return registers, scratch_bytes


def _signature(case: KernelCase) -> dict[str, str]:
    """Return the type of every argument, in the kernel's order."""
    names = case.kernel.arg_names
    known_names = case.types.keys() | case.constexprs.keys()
    expect(
        known_names == set(names),
        f"{case.name}: the arguments {sorted(known_names ^ set(names))} are missing or unknown",
    )
    return {name: case.types.get(name, "constexpr") for name in names}


def _hints(case: KernelCase) -> dict[tuple[int], list[list[object]]]:
    """Return the arguments that are divisible by 16, in the compiler's format."""
    return {
        (index,): [["tt.divisibility", _ALIGNMENT]]
        for index, name in enumerate(case.kernel.arg_names)
        if case.types.get(name, "fp").startswith(("*", "i")) and name not in case.unaligned
    }


@contextmanager
def _no_cache() -> Iterator[None]:
    """Set a temporary cache directory for Triton."""
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
            [_assembler(target), "-v", f"--gpu-name={target}", path, "-o", f"{folder}/cubin"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    output = done.stdout + done.stderr
    registers = re.findall(r"Used (\d+) registers", output)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", output)
    expect(
        len(registers) == 1 and len(spills) == 2,
        f"the output of Triton's assembler cannot be parsed: {output}",
    )
    return int(registers[0]), sum(map(int, spills))


def _assembler(target: str) -> str:
    """Return the path of the assembler that Triton includes for an NVIDIA target."""
    folder = Path(str(import_module("triton").__file__)).parent
    (capability,) = re.findall(r"\d+", target)
    name = "ptxas-blackwell" if int(capability) >= _FIRST_BLACKWELL else "ptxas"
    return str(folder / "backends" / "nvidia" / "bin" / name)
