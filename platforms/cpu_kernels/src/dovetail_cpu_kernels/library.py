"""The native library in this process: whether it is available, its level, its threads.

Loaded once, on first use. This module does not depend on a tensor library: memory is passed as
addresses. Operations do not validate arguments (see `dovetail_kernels.h`); the caller must check
shapes and addresses.
"""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ABI_VERSION = 17
PACK_VERSION = 5  # of the bytes of packed weights
LEVELS = (
    "portable",
    "avx2",
    "avx2_vnni",
    "avx512",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_amx",
)
LEVEL_VARIABLE = "DOVETAIL_CPU_LEVEL"
"""Environment variable that selects the instruction set of native kernels, such as "portable"."""
MAX_THREADS = 64
LIBRARY = Path(__file__).with_name("_native.so")
BUILD_REPORT = Path(__file__).with_name("_build.json")

_INT64 = ctypes.c_int64
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "dk_abi_version": (_INT64, []),
    "dk_pack_version": (_INT64, []),
    "dk_struct_bytes": (_INT64, [ctypes.c_char_p]),
    "dk_supports_level": (_INT64, [_INT64]),
    "dk_level": (_INT64, []),
    "dk_highest_level": (_INT64, []),
    "dk_set_level": (_INT64, [_INT64]),
    "dk_set_num_threads": (None, [_INT64]),
    "dk_num_threads": (_INT64, []),
    "dk_alloc": (ctypes.c_void_p, [_INT64]),
    "dk_free": (None, [ctypes.c_void_p, _INT64]),
    "dk_failed_operation": (ctypes.c_char_p, []),
    "dk_failed_bytes": (_INT64, []),
    "dk_record_begin": (None, []),
    "dk_record_end": (ctypes.c_void_p, [ctypes.c_void_p]),
    "dk_record_free": (None, [ctypes.c_void_p]),
    "dk_packed_bytes": (_INT64, [_INT64] * 5),
}


class NativeUnavailableError(ImportError):
    """The native library is not available. The message gives the reason and the remedy."""


class NativeMemoryError(MemoryError):
    """A native operation could not allocate memory. Its outputs are undefined.

    It may be called again. operation: its name, such as "dk_attention". num_bytes: the bytes that
    could not be allocated, or 0.
    """

    def __init__(self, operation: str, num_bytes: int) -> None:
        self.operation, self.num_bytes = operation, num_bytes
        size = f"{num_bytes} bytes of working memory" if num_bytes else "working memory"
        super().__init__(
            f"the native operation {operation} needs {size}, which the system does not have: make "
            "more memory available, or lower kv_cache_memory_bytes or max_num_batched_tokens"
        )


@dataclass(frozen=True, kw_only=True)
class NativeStatus:
    """The status of the native library.

    available: whether it can be used. level: the instruction set in use, one of LEVELS, or "".
    reason: why it is not available, or why the level is not the CPU's highest; else "".
    compiler: the compiler's command for the library, or "".
    """

    available: bool
    level: str
    reason: str
    compiler: str


@cache
def library() -> ctypes.CDLL:
    """Return the native library, loaded once, at the level that the environment selects.

    Operations, `int64_t dk_<op>(const dk_<op>_args*)`, are returned by `native_operation`. Calls
    release the interpreter's lock.

    Raises NativeUnavailableError with the reason and the remedy.
    """
    if not LIBRARY.is_file():
        raise NativeUnavailableError(_missing_reason())
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        loaded.dk_abi_version.restype = _INT64
        _check_layout(loaded)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        loaded.dk_replay.restype = check_result
        loaded.dk_replay.argtypes = [ctypes.c_void_p, _INT64]
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{LIBRARY.name} cannot be loaded: {error}") from error
    requested = _requested_level()
    if requested is not None:
        loaded.dk_set_level(requested)
    return loaded


def native_operation(name: str) -> ctypes._NamedFuncPointer:
    """Return the operation `dk_<name>`: call it with the address of its struct.

    The function raises NativeMemoryError if the operation could not allocate memory.
    """
    function = getattr(library(), f"dk_{name}")
    function.argtypes, function.restype = [ctypes.c_void_p], check_result
    return function


def check_result(result: int) -> None:
    """Raise NativeMemoryError if an operation of this thread did not return 0."""
    if result:
        loaded = library()
        raise NativeMemoryError(loaded.dk_failed_operation().decode(), loaded.dk_failed_bytes())


def status() -> NativeStatus:
    """Return the status of the native library. Try to load it first."""
    compiler = _build_report().get("compiler", "")
    try:
        loaded = library()
    except NativeUnavailableError as error:
        return NativeStatus(available=False, level="", reason=str(error), compiler=compiler)
    level, highest = loaded.dk_level(), loaded.dk_highest_level()
    lowered = (
        f"{LEVEL_VARIABLE} or a caller selected a lower level than {LEVELS[highest]}, which this "
        f"CPU supports"
    )
    reason = lowered if level < highest else ""
    return NativeStatus(available=True, level=LEVELS[level], reason=reason, compiler=compiler)


def usable_levels() -> list[int]:
    """Return the levels (indices of LEVELS) that this CPU and the library support, maybe none.

    A level may be missing although a higher level is supported.
    """
    if not status().available:
        return []
    return [level for level in range(len(LEVELS)) if library().dk_supports_level(level)]


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of the team, including the caller. Stops the previous workers.

    Raises ValueError for a number that is not between 1 and 64.
    """
    if not 1 <= num_threads <= MAX_THREADS:
        raise ValueError(
            f"{num_threads} threads were requested, but a thread team supports 1 to "
            f"{MAX_THREADS} threads"
        )
    library().dk_set_num_threads(num_threads)


def num_threads() -> int:
    """Return the number of threads of the team, including the caller."""
    return int(library().dk_num_threads())


def _check_layout(loaded: ctypes.CDLL) -> None:
    """Raise NativeUnavailableError if the library and this package differ in their ABI.

    The version is compared first, because an older library may lack the other functions.
    """
    from dovetail_cpu_kernels.structs import STRUCTS

    differences = [("ABI version", loaded.dk_abi_version(), ABI_VERSION)]
    if differences[0][1] == ABI_VERSION:
        differences.append(("packed format", loaded.dk_pack_version(), PACK_VERSION))
        for name, struct in STRUCTS.items():
            actual = loaded.dk_struct_bytes(name.encode())
            differences.append((f"bytes of {name}:", actual, ctypes.sizeof(struct)))
    for what, actual, needed in differences:
        if actual != needed:
            raise NativeUnavailableError(
                f"{LIBRARY.name} has {what} {actual}, but this package needs {needed}: "
                "reinstall dovetail-cpu-kernels"
            )


def _requested_level() -> int | None:
    name = os.environ.get(LEVEL_VARIABLE, "")
    if not name:
        return None
    if name not in LEVELS:
        raise NativeUnavailableError(
            f"{LEVEL_VARIABLE} is {name!r}: it must be one of {', '.join(LEVELS)}, or unset"
        )
    return LEVELS.index(name)


def _build_report() -> dict[str, str]:
    try:
        report: dict[str, str] = json.loads(BUILD_REPORT.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return report


def _missing_reason() -> str:
    why = _build_report().get("reason") or "the library was not built"
    return f"{LIBRARY.name} is missing: {why}; reinstall dovetail-cpu-kernels with a C++17 compiler"
