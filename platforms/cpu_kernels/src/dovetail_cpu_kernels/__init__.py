"""Native CPU kernels with a C ABI: the library, its status, and ctypes structs.

Contract: `include/dovetail_kernels.h`. This module needs neither torch nor numpy, and does not load
the library on import.
"""

from dovetail_cpu_kernels.library import (
    LEVELS,
    NativeMemoryError,
    NativeStatus,
    NativeUnavailableError,
    library,
    num_threads,
    set_num_threads,
    status,
    usable_levels,
)

__all__ = [
    "LEVELS",
    "NativeMemoryError",
    "NativeStatus",
    "NativeUnavailableError",
    "library",
    "num_threads",
    "set_num_threads",
    "status",
    "usable_levels",
]
