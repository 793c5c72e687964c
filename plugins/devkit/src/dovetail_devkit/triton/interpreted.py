"""Tests of Triton kernels in Triton's interpreter, in a process of their own.

Whether kernels are interpreted is settled when they are decorated, for the whole process: so a
package keeps these tests in files `interpreted_*.py`, which no ordinary run collects, and one test
of the ordinary run starts them here and holds their counts. Depends on neither Triton nor kernels.
The interpreter computes on the host, in numpy. It shows what a kernel means, not how fast it is,
and its bfloat16 is not a device's: sums of two bfloat16 are wrong there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FILES = "interpreted_*.py"
_QUICK = "dovetail_devkit.triton.quick_interpreter"
_INTERPRETER = "triton.runtime.interpreter"
"""Where numpy warns of infinities; a device says nothing."""
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What became of the tests. failed: errors included. told: the whole output."""

    passed: int
    failed: int
    skipped: int
    told: str


def run_interpreted(folder: Path, *plugins: str, timeout_s: float) -> Counts:
    """Run the tests in `folder` interpreted, and return their counts.

    plugins: "kind:name" of those that the conformance kit checks in the same process, on the host.
    Raises subprocess.TimeoutExpired after `timeout_s` seconds, and AssertionError where the run
    ends without a count.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", _QUICK]
    command += ["-o", f"python_files={_FILES}", "-W", f"ignore::RuntimeWarning:{_INTERPRETER}"]
    command += [option for plugin in plugins for option in ("--dovetail-plugin", plugin)]
    done = subprocess.run(
        [*command, "--dovetail-device", "cpu", str(folder)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    told = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if _COUNT.search(line)]
    if not lines:
        raise AssertionError(f"the interpreted tests of {folder} end without a count:\n{told}")
    counts = {what.rstrip("s"): int(number) for number, what in _COUNT.findall(lines[-1])}
    return Counts(
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        skipped=counts.get("skipped", 0),
        told=told,
    )
