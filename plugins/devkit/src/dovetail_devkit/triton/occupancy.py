"""Computes a kernel's occupancy: the share of a multiprocessor's warps that can be resident.

The limits are those of the CUDA C++ Programming Guide (compute capabilities) and of the CDNA 3
Instruction Set Architecture. This module does not depend on Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB = 1 << 10


@dataclass(frozen=True, kw_only=True)
class ProcessorLimits:
    """Resources of one processor (SM or CU).

    registers: 32-bit registers of all threads. register_unit: register allocation granularity per
    warp. reserved_bytes: shared memory that the system takes per block.
    """

    threads_per_warp: int = 32
    max_warps: int
    max_blocks: int
    registers: int = 64 * _KIB
    register_unit: int = 256
    shared_bytes: int
    reserved_bytes: int = _KIB


_LARGE = ProcessorLimits(max_warps=64, max_blocks=32, shared_bytes=228 * _KIB)
_MEDIUM = ProcessorLimits(max_warps=48, max_blocks=24, shared_bytes=100 * _KIB)
LIMITS = {
    "sm_80": ProcessorLimits(max_warps=64, max_blocks=32, shared_bytes=164 * _KIB),
    "sm_86": ProcessorLimits(max_warps=48, max_blocks=16, shared_bytes=100 * _KIB),
    "sm_89": _MEDIUM,
    "sm_90": _LARGE,
    "sm_100": _LARGE,
    "sm_120": ProcessorLimits(max_warps=48, max_blocks=32, shared_bytes=100 * _KIB),
    "gfx942": ProcessorLimits(
        threads_per_warp=64,
        max_warps=32,
        max_blocks=32,
        registers=4 * 512 * 64,
        register_unit=8 * 64,
        shared_bytes=64 * _KIB,
        reserved_bytes=0,
    ),
}
"""Limits by target. Four SIMD units of a gfx942 multiprocessor have 512 registers per lane each."""


def occupancy(target: str, *, num_warps: int, registers: int, shared_bytes: int) -> float:
    """Return the share of a multiprocessor's warps that can be resident, between 0 and 1.

    num_warps: warps of a block. registers: number per thread. shared_bytes: size per block. Raises
    KeyError for an unknown target.
    """
    limits = LIMITS[target]
    unit = limits.register_unit
    per_warp = -(-registers * limits.threads_per_warp // unit) * unit
    warps_by_registers = limits.registers // per_warp if per_warp else limits.max_warps
    by_shared = limits.max_blocks
    if used := shared_bytes and shared_bytes + limits.reserved_bytes:
        by_shared = limits.shared_bytes // used
    blocks = min(
        limits.max_blocks,
        min(limits.max_warps, warps_by_registers) // num_warps,
        by_shared,
    )
    return blocks * num_warps / limits.max_warps
