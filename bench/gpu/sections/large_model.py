"""Measures the throughput of a model shape with 8 B parameters. See `gpu.throughput`."""

from __future__ import annotations

from gpu.report import Report, Task
from gpu.throughput import measure_shape


def run(task: Task, report: Report) -> None:
    """Measure the throughput of this shape."""
    measure_shape("qwen3-8b", task, report)
