"""Measures the device with torch operations: the limits for all other metrics.

Copy: 4 GiB within device memory, counting bytes read and written. Read: the sum of 4 GiB of float32
values. Matrix product: 8192³ in bf16, random values. Each metric is the median of 10 runs.
"""

from __future__ import annotations

import statistics

import torch

from gpu.report import Report, Task
from gpu.stopwatch import time_calls

_COPY_BYTES = 4 << 30
_SMALL_COPY_BYTES = 8 << 20
_SIDE = 8192
_SMALL_SIDE = 256


def run(task: Task, report: Report) -> None:
    """Measure copy and read bandwidth and the rate of a matrix product."""
    copy_gb_s, read_gb_s = memory_rates(task)
    report.metric("copy_gb_s", copy_gb_s)
    report.metric("read_gb_s", read_gb_s)
    report.metric("gemm_tflop_s", _product_rate(task))


def memory_rates(task: Task) -> tuple[float, float]:
    """Return the rates of copies, which count reads and writes, and of reads, in GB/s."""
    num_bytes = _SMALL_COPY_BYTES if task.small else _COPY_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=task.parts.device_type)
    target = torch.empty_like(source)
    copy_s = statistics.median(time_calls(lambda: target.copy_(source), task.device))
    numbers = source.view(torch.float32)
    read_s = statistics.median(time_calls(numbers.sum, task.device))
    return 2 * num_bytes / copy_s / 1e9, num_bytes / read_s / 1e9


def _product_rate(task: Task) -> float:
    side = _SMALL_SIDE if task.small else _SIDE
    generator = torch.Generator().manual_seed(task.seed)
    left, right = (
        torch.randn(side, side, generator=generator).to(task.parts.device_type, torch.bfloat16)
        for _ in range(2)
    )
    seconds = statistics.median(time_calls(lambda: left @ right, task.device))
    return 2 * side**3 / seconds / 1e12
