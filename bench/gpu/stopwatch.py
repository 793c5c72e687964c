"""Measures the time of calls with device events, or with the clock if calls are synchronous."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gpu.device_parts import PARTS, STAND_INS


def time_calls(
    call: Callable[[], object], device: str, *, repeats: int = 10, warm_ups: int = 3
) -> list[float]:
    """Return the seconds of each of `repeats` calls. First make `warm_ups` other calls.

    device: the name of a device in `PARTS`.
    """
    for _ in range(warm_ups):
        call()
    if device in STAND_INS:
        return [_clocked(call) for _ in range(repeats)]
    module = torch.get_device_module(PARTS[device].device_type)
    pairs = []
    for _ in range(repeats):
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    module.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def _clocked(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
