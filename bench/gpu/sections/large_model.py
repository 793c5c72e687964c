"""The shape of 8 B parameters: see `gpu.throughput`."""

from __future__ import annotations

from gpu.report import Report, Task
from gpu.throughput import measure_shape


def run(task: Task, report: Report) -> None:
    """Measure it."""
    measure_shape("qwen3-8b", task, report)
