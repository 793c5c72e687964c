"""Measures the machine's limits next to every engine: read bandwidth, and GEMM in bf16 and int8.

Read bandwidth: each thread runs libc's `memchr` over its part of 256 MiB and searches for a byte
that does not occur, which reads each cache line once and writes nothing. In tests it was as fast as
a loop of 512-bit loads. GEMM: torch, 2,048³, or 512³ if the larger product would take longer than
`MAX_GEMM_S`, as on CPUs without instructions for the type. Each result is the best of several
passes, because it is a limit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from peers.serving import serve

BUFFER_BYTES = 256 << 20
NUM_READS, NUM_GEMMS = 8, 4
GEMM_SIZE, SMALL_GEMM_SIZE = 2048, 512
MAX_GEMM_S = 1.0
FILLED_WITH, SOUGHT = 1, 2


class _Gemm(NamedTuple):
    """A product of two square matrices with `size` rows."""

    size: int
    run: Callable[[], Any]


class Probe:
    """Allocates buffers once and measures with them."""

    def start(self, threads: int) -> dict[str, Any]:
        """Allocate the buffers and run each measurement once."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._memory = mmap.mmap(-1, BUFFER_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._address, FILLED_WITH, BUFFER_BYTES)
        self._search = ctypes.CDLL(None).memchr
        self._search.restype = ctypes.c_void_p
        self._search.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        self._gemms = _gemms(threads)
        return self.measure()

    def measure(self) -> dict[str, Any]:
        """Return {"read_gbps": GB/s, "bf16_gflops": GFLOP/s, "int8_gflops": …}, if available."""
        rates = {"read_gbps": BUFFER_BYTES / _min_s(self._read, NUM_READS) / 1e9}
        for name, gemm in self._gemms.items():
            rates[name] = 2 * gemm.size**3 / _min_s(gemm.run, NUM_GEMMS) / 1e9
        return rates

    def _read(self) -> None:
        part = BUFFER_BYTES // self._threads
        starts = range(self._address, self._address + part * self._threads, part)
        # ctypes releases the GIL during the call.
        searches = [self._pool.submit(self._search, start, SOUGHT, part) for start in starts]
        if any(search.result() is not None for search in searches):
            raise RuntimeError("the buffer of the bandwidth probe was written to")


def _gemms(threads: int) -> dict[str, _Gemm]:
    """Return the largest GEMM of each dtype that takes at most `MAX_GEMM_S` seconds."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    torch.set_num_threads(threads)
    small, large = (_gemms_of(size) for size in (SMALL_GEMM_SIZE, GEMM_SIZE))
    small_s = {name: _min_s(gemm.run, NUM_GEMMS) for name, gemm in small.items()}
    longest_s = MAX_GEMM_S * (SMALL_GEMM_SIZE / GEMM_SIZE) ** 3
    return {name: large[name] if small_s[name] <= longest_s else small[name] for name in small}


def _gemms_of(size: int) -> dict[str, _Gemm]:
    import torch

    wide_KN = torch.ones((size, size), dtype=torch.bfloat16)
    byte_KN = torch.ones((size, size), dtype=torch.int8)
    wide_out_KN = torch.empty_like(wide_KN)
    sums_KN = torch.empty((size, size), dtype=torch.int32)
    runs: dict[str, Callable[[], Any]] = {
        "bf16_gflops": lambda: torch.mm(wide_KN, wide_KN, out=wide_out_KN),
        "int8_gflops": lambda: torch._int_mm(byte_KN, byte_KN.t(), out=sums_KN),
    }
    return {name: _Gemm(size, run) for name, run in runs.items()}


def _min_s(run: Callable[[], Any], passes: int) -> float:
    seconds = []
    for _ in range(passes):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


if __name__ == "__main__":
    probe = Probe()
    serve({"start": probe.start, "measure": probe.measure})
