"""Runs a benchmark script of this directory as a section of the check and reports its metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpu.device_parts import STAND_INS
from gpu.processes import python_path, run_until
from gpu.report import NeedsDeviceError, Report, Task

HERE = Path(__file__).resolve().parent
NO_DEVICE_CODE = 3
_MARGIN_S = 4.0
"""Time in seconds that a section needs to start its process and to report the metrics."""


def run_script(name: str, task: Task, report: Report) -> None:
    """Run `NAME.py --json FILE --device TYPE` until its deadline and report its metrics.

    Exit code 3 means that its device is not available; other nonzero codes are failures.
    """
    deadline_s = max(task.deadline_s - _MARGIN_S, 1.0)
    device = task.device if task.device in STAND_INS else task.parts.device_type
    file = task.folder / "metrics.json"
    words = ["--json", str(file), "--device", device, *(["--small"] if task.small else [])]
    ended = run_until(
        [sys.executable, str(HERE / f"{name}.py"), *words],
        environment=python_path(),
        folder=task.folder,
        deadline_s=deadline_s,
        apart=False,
    )
    if ended.code == NO_DEVICE_CODE:
        raise NeedsDeviceError(ended.output)
    if ended.code is None:
        report.fail(f"{name}.py did not finish within {deadline_s:.0f} s; {ended.output}")
    elif ended.code != 0:
        report.fail(f"{name}.py exited with code {ended.code}: {ended.output}")
    if file.is_file():
        for item in json.loads(file.read_text(encoding="utf-8"))["metrics"]:
            report.metric(
                item["name"], item["value"], unit=item.get("unit", ""), note=item.get("note", "")
            )
