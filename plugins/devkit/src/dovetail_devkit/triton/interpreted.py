"""Runs tests of Triton kernels in Triton's interpreter, in a separate process.

Whether kernels are interpreted is decided when they are decorated, for the whole process. So a
package keeps these tests in files `interpreted_*.py`, which a normal run does not collect; one test
of the normal run starts them with this module and checks their counts. Depends on neither Triton
nor kernels. The interpreter computes on the host, in numpy. It does not show a kernel's speed, and
its bfloat16 differs from a device's: sums of two bfloat16 are wrong.
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
"""Ignores numpy's warnings about infinities, which a device does not give."""
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of the tests. failed: including errors. told: the complete output."""

    passed: int
    failed: int
    skipped: int
    told: str


def run_interpreted(folder: Path, *plugins: str, timeout_s: float) -> Counts:
    """Run the tests in `folder` interpreted, and return their counts.

    plugins: "kind:name" of plugins that the conformance kit checks in the same process, on the
    host. Raises subprocess.TimeoutExpired after `timeout_s` seconds, and AssertionError if the run
    ends without counts.
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
        raise AssertionError(f"the interpreted tests of {folder} ended without counts:\n{told}")
    counts = {what.rstrip("s"): int(number) for number, what in _COUNT.findall(lines[-1])}
    return Counts(
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        skipped=counts.get("skipped", 0),
        told=told,
    )
