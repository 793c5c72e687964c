"""Measure how fast this machine reads memory and multiplies, with the current team and level.

For benchmarks: run them in the same process as a kernel, because bandwidth varies.
"""

from __future__ import annotations

import ctypes
import time

from dovetail_cpu_kernels.library import native_operation

PIECE_BYTES = 256 << 10
NUM_ITERATIONS = 64 << 12


class ProbeReadArgs(ctypes.Structure):
    """The struct `dk_probe_read_args`."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
    )


class ProbeMultiplyArgs(ctypes.Structure):
    """The struct `dk_probe_multiply_args`."""

    _fields_ = (
        ("result", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("iterations", ctypes.c_int64),
    )


def read_bandwidth(memory: int, num_bytes: int) -> float:
    """Read `num_bytes` (rounded down to 256 KiB) at `memory` once. Return bytes per second."""
    result = ctypes.c_int64(0)
    whole = num_bytes // PIECE_BYTES * PIECE_BYTES
    args = ProbeReadArgs(memory, ctypes.addressof(result), whole)
    began = time.perf_counter()
    native_operation("probe_read")(ctypes.addressof(args))
    return whole / (time.perf_counter() - began)


def multiply_rate(kind: int) -> float:
    """Multiply in registers for some milliseconds. Return operations per second.

    kind: `linear.BF16` or `linear.INT8`. A multiplication and its addition count as two operations.
    """
    result = ctypes.c_int64(0)
    args = ProbeMultiplyArgs(ctypes.addressof(result), kind, NUM_ITERATIONS)
    began = time.perf_counter()
    native_operation("probe_multiply")(ctypes.addressof(args))
    return result.value / (time.perf_counter() - began)
