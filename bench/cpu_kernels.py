"""Compare the packed linear layers of dovetail-cpu-kernels with the machine's limits.

Method: each weight of a 0.6 B model's shapes is packed once and copied until the copies have at
least 160 MB, so that no copy stays in a cache; one native replay is a pass over all copies. Each
measurement also probes, in the same run and with the same threads, the read bandwidth (256 MiB) and
the peak of the multiply instruction in registers. The first percentage is weight bytes per second
relative to the bandwidth, the second is operations per second relative to the peak. Each result is
the median of 7 passes, or of 3 passes above 64 rows. `--team` measures a pass as in a decode step,
without and with another busy process.

    python bench/cpu_kernels.py [--kinds bf16,int8,int4,Q4_K] [--group 32] [--threads 1,2]
        [--rows 1,2,4,8,16,32,64,256,512] [--shapes qkv,o,gate_up,down,head] [--team] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels import linear, probe

SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
MIN_BYTES = 160 << 20
PROBE_BYTES = 256 << 20
TEAM_LAYERS = 28
HOG_PASSES = 60


class Call(ctypes.Structure):
    """The C struct `dk_call`."""

    _fields_ = (("fn", ctypes.c_void_p), ("args", ctypes.c_void_p))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of the table. Rates per second, `*_share` relative to the probe of the same run."""

    kind: str
    shape: str
    threads: int
    rows: int
    us: float
    gb: float
    bandwidth_share: float
    gflop: float
    peak_share: float
    spread: float


class Memory:
    """Native memory that is freed at the end of a `with` block."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address = native.library().dk_alloc(num_bytes)

    def __enter__(self) -> int:
        """Allocate the memory and return its address."""
        return self.address

    def __exit__(self, *_: object) -> None:
        """Free the memory."""
        native.library().dk_free(self.address, self.num_bytes)


def fill_bf16(address: int, count: int, seed: int) -> None:
    """Write `count` bf16 values of both signs with magnitudes between 1 and 2."""
    block = random.Random(seed).randbytes(1 << 20)
    words = bytearray(block)
    words[1::2] = bytes((byte & 0x80) | 0x3F for byte in words[1::2])
    for at in range(0, count * 2, len(words)):
        ctypes.memmove(address + at, bytes(words), min(len(words), count * 2 - at))


def timed_passes(calls: ctypes.Array[Call], repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` replays of `calls`, after one warm-up replay."""
    library, times = native.library(), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        library.dk_replay(ctypes.addressof(calls), len(calls))
        times.append(time.perf_counter() - began)
    return times[1:]


def calls_of(kind: int, args: list[linear.LinearArgs]) -> ctypes.Array[Call]:
    """Return the recorded native calls for these arguments."""
    function = ctypes.cast(linear.operation(kind), ctypes.c_void_p).value
    return (Call * len(args))(*(Call(function, ctypes.addressof(item)) for item in args))


def measure(name: str, kind: int, group: int, options: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the results of one weight for every number of threads and rows."""
    N, K = SHAPES[name]
    shape = linear.PackedLinear(kind=kind, N=N, K=K, group=group if kind == linear.INT4 else 0)
    size = -(-shape.num_bytes // 4096) * 4096
    copies = max(2, MIN_BYTES // size + 1)
    maximum = max(options.rows)
    with (
        Memory(N * K * 2) as weight,
        Memory(size * copies) as packed,
        Memory(maximum * (K + N) * 2) as rows,
        Memory(PROBE_BYTES) as probed,
    ):
        fill_bf16(weight, N * K, seed=N)
        fill_bf16(rows, maximum * K, seed=K)
        ctypes.memset(probed, 1, PROBE_BYTES)
        linear.pack(shape, weight, packed)
        for copy in range(1, copies):
            ctypes.memmove(packed + copy * size, packed, shape.num_bytes)
        args = [linear.new_args(shape, packed + copy * size) for copy in range(copies)]
        for item in args:
            item.x, item.y = rows, rows + maximum * K * 2
        for threads in options.threads:
            native.set_num_threads(threads)
            for count in options.rows:
                yield measurement_of(name, shape, args, count, probed)


def measurement_of(
    name: str, shape: linear.PackedLinear, args: list[linear.LinearArgs], count: int, probed: int
) -> Measurement:
    """Measure `count` rows, with probes before and after the measurement."""
    used = args if count <= 64 else args[: max(1, len(args) // 8)]
    for item in used:
        item.M = count
    bandwidth = [probe.read_bandwidth(probed, PROBE_BYTES) for _ in range(2)][1:]
    instruction = linear.BF16 if shape.kind == linear.BF16 else linear.INT8
    peak = probe.multiply_rate(instruction)
    times = timed_passes(calls_of(shape.kind, used), 7 if count <= 64 else 3)
    bandwidth.append(probe.read_bandwidth(probed, PROBE_BYTES))
    seconds = statistics.median(times) / len(used)
    rate, flops = shape.num_bytes / seconds, 2 * count * shape.N * shape.K / seconds
    return Measurement(
        kind=linear.KIND_NAMES[shape.kind] + (f"g{shape.group}" if shape.group else ""),
        shape=name,
        threads=native.num_threads(),
        rows=count,
        us=seconds * 1e6,
        gb=rate / 1e9,
        bandwidth_share=rate / statistics.mean(bandwidth),
        gflop=flops / 1e9,
        peak_share=flops / peak,
        spread=(max(times) - min(times)) / statistics.median(times),
    )


def burn() -> None:
    """Keep one core busy until killed."""
    while True:
        pass


def measure_team() -> dict[str, float]:
    """Return the ms of a pass of 112 linear layers, without and with another busy process."""
    shapes = [linear.PackedLinear(kind=linear.BF16, N=N, K=K) for N, K in list(SHAPES.values())[:4]]
    sizes = [-(-shape.num_bytes // 4096) * 4096 for shape in shapes]
    native.set_num_threads(os.cpu_count() or 1)
    with Memory(sum(sizes) * TEAM_LAYERS) as packed, Memory(1 << 20) as rows:
        ctypes.memset(packed, 0, sum(sizes) * TEAM_LAYERS)
        args, at = [], packed
        for _ in range(TEAM_LAYERS):
            for shape, size in zip(shapes, sizes, strict=True):
                kernel_args = linear.new_args(shape, at)
                kernel_args.x, kernel_args.y, kernel_args.M = rows, rows + (1 << 19), 1
                args.append(kernel_args)
                at += size
        calls = calls_of(linear.BF16, args)
        alone = timed_passes(calls, HOG_PASSES)
        hog = multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
        hog.start()
        time.sleep(1.0)
        under_load = timed_passes(calls, HOG_PASSES)
        hog.kill()
        hog.join()
    return {
        "alone_ms": statistics.median(alone) * 1e3,
        "hog_ms": statistics.median(under_load) * 1e3,
        "hog_mean_ms": statistics.mean(under_load) * 1e3,
        "hog_worst_ms": max(under_load) * 1e3,
    }


def numbers(text: str) -> list[int]:
    """Parse a list of integers."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Run the requested measurements and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", default="bf16,int8,int4", type=lambda text: text.split(","))
    parser.add_argument("--shapes", default="qkv,head", type=lambda text: text.split(","))
    parser.add_argument("--threads", default="1,2", type=numbers)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256,512", type=numbers)
    parser.add_argument("--group", default=32, type=int)
    parser.add_argument("--team", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(native.status())
    measurements = []
    for kind in options.kinds:
        for name in options.shapes:
            for row in measure(name, linear.KIND_NAMES.index(kind), options.group, options):
                measurements.append(row)
                print(
                    f"{row.kind:8} {row.shape:8} T={row.threads} M={row.rows:4} {row.us:9.1f} us  "
                    f"{row.gb:6.1f} GB/s ({row.bandwidth_share:4.0%})  "
                    f"{row.gflop:7.1f} GFLOP/s ({row.peak_share:4.0%})  spread {row.spread:4.0%}",
                    flush=True,
                )
    team = measure_team() if options.team else {}
    for key, value in team.items():
        print(f"team {key:14} {value:7.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"linear": [asdict(row) for row in measurements], "team": team}, file, indent=1
            )


if __name__ == "__main__":
    main()
