"""Measures the kernels with `bench/gpu/ops.py` on the device."""

from __future__ import annotations

from gpu.kernel_bench import run_script
from gpu.report import Report, Task


def run(task: Task, report: Report) -> None:
    """Run the benchmark script and report its metrics."""
    run_script("ops", task, report)
