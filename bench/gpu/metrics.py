"""Measures device times of kernels, and prints and stores the metrics of a script.

Each metric of a script is a median of several rounds after the warm-ups.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from gpu.stopwatch import time_calls

NO_GPU = 3
"""Exit code of a script without a GPU."""
NUM_ROUNDS = 10
NUM_WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measurement."""

    name: str
    value: float
    unit: str
    note: str


def median_s(run: Callable[[], object]) -> float:
    """Return the median time of a call on the device, in seconds."""
    return median(time_calls(run, "cuda", repeats=NUM_ROUNDS, warm_ups=NUM_WARM_UPS))


def graph_s(run: Callable[[], object]) -> float:
    """Return the median time of the operations of a call, captured in a graph, in seconds.

    The time excludes the host's work. Make the call once before, so that it compiles nothing here.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_s(graph.replay)


def report_metrics(
    script: str, description: str, measure: Callable[[torch.device, bool], Iterator[Metric]]
) -> int:
    """Run a script: print its metrics, and write them to a file. Return the exit code.

    script: its path, for the message without a GPU. description: its line in `--help`. measure:
    yields the metrics for a device; the second argument is True for fewer cases.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="file for the measurements")
    parser.add_argument("--device", default="cuda", help="torch's name of the device")
    parser.add_argument("--small", action="store_true", help="fewer cases")
    chosen = parser.parse_args()
    if not chosen.device.startswith("cuda") or not torch.cuda.is_available():
        print(f"{script} needs a GPU; none was found")
        return NO_GPU
    metrics = []
    for metric in measure(torch.device(chosen.device), chosen.small):
        print(f"{metric.name:48} {metric.value:10.1f} {metric.unit:8} {metric.note}", flush=True)
        metrics.append(asdict(metric))
        if chosen.json:  # after each metric, so that a process killed at its deadline keeps them
            write_metrics(chosen.json, metrics)
    return 0


def write_metrics(file: Path, metrics: list[dict[str, object]]) -> None:
    """Replace the file by the metrics, atomically."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"metrics": metrics}, indent=1) + "\n", "utf-8")
    part.replace(file)
