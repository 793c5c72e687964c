"""Measure an all-reduce of CPU ranks: µs of `RankGroup.all_reduce` between processes, by size.

Run `python bench/all_reduce.py --ranks 2`. Method: one process for each rank, with one torch
thread. "pairwise" is the CPU platform's method over unix sockets, "gloo" the all_reduce of torch's
gloo over loopback. A round is CALLS consecutive calls, like the calls of a model's layers. A result
is the time per call on rank 0: the median of the rounds, with the fastest and the slowest round.
Three warm-up rounds are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch import distributed
from torch.distributed import FileStore

from dovetail.interfaces import RankGroup
from dovetail_cpu.runtime import CPURuntime
from dovetail_torch.distributed.process_ranks import ProcessRanks

SHAPES = ((1, 1024), (16, 1024), (256, 1024))
DTYPES = (torch.float32, torch.bfloat16)
CALLS = 100
WARM_UP = 3
PATIENCE = timedelta(seconds=60)


def join_gloo(store: FileStore, rank: int, size: int) -> ProcessRanks:
    """Return a gloo group over loopback."""
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = PATIENCE
    return ProcessRanks(gloo(store, rank, size, options), rank=rank, size=size)


def measure(ranks: RankGroup, x: torch.Tensor, rounds: int) -> list[float]:
    """Return the µs per call of each round."""
    durations = []
    for _ in range(rounds + WARM_UP):
        x.fill_(1e-6)
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            ranks.all_reduce(x)
        durations.append((time.perf_counter_ns() - start) / 1e3 / CALLS)
    return durations[WARM_UP:]


def run_rank(rank: int, size: int, path: str, rounds: int) -> None:
    """Run one rank. Rank 0 prints the results."""
    torch.set_num_threads(1)
    store = FileStore(path, size)
    pairwise = CPURuntime().join(store, rank=rank, size=size, timeout=PATIENCE)
    ring = join_gloo(store, rank, size)
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        x = torch.empty(shape, dtype=dtype)
        for name, ranks in (("pairwise", pairwise), ("gloo", ring)):
            times = measure(ranks, x, rounds)
            if rank == 0:
                label = f"{size} ranks, {list(shape)} {str(dtype).removeprefix('torch.')}, {name}"
                values = f"{median(times):8.1f} µs  ({min(times):.1f} to {max(times):.1f})"
                print(f"{label:46}{values}", flush=True)


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", nargs=2, metavar=("RANK", "STORE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, path = args.rank
        run_rank(int(rank), args.ranks, path, args.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(args.ranks)]
        command += ["--rounds", str(args.rounds), "--rank"]
        path = str(Path(folder, "store"))
        started = [subprocess.Popen([*command, str(rank), path]) for rank in range(args.ranks)]
        if any([process.wait() for process in started]):
            sys.exit("a rank failed")


if __name__ == "__main__":
    main()
