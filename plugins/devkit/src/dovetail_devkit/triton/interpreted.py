"""Runs tests of Triton kernels in Triton's interpreter, in a separate process.

Triton decides for the whole process whether kernels are interpreted, when they are decorated. So a
package keeps these tests in files `interpreted_*.py`, which a normal run does not collect. One test
of the normal run starts them with this module and checks their counts. Does not depend on Triton
or on kernels. The interpreter computes on the host, in numpy. It is slow, and differs from a device
in bfloat16: sums of two bfloat16 are wrong.
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
"""Module in which numpy's warnings about infinities are ignored, as a device does not warn."""
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of tests by outcome. failed: includes errors. told: the complete output of pytest."""

    passed: int
    failed: int
    skipped: int
    told: str


def run_interpreted(
    folder: Path, *plugins: str, timeout_s: float, complete: bool = False
) -> Counts:
    """Run the tests in `folder` interpreted, and return their counts.

    plugins: "kind:name" of plugins that the conformance kit checks in the same process, on the
    host. complete: also run the cases that pytest's settings deselect, such as slow cases. Raises
    subprocess.TimeoutExpired after `timeout_s` seconds, and AssertionError if the run
    ends without counts.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", _QUICK]
    command += ["-o", f"python_files={_FILES}", "-W", f"ignore::RuntimeWarning:{_INTERPRETER}"]
    command += ["-m", ""] if complete else []
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
        raise AssertionError(
            f"pytest printed no counts for the interpreted tests of {folder}:\n{told}"
        )
    counts = {what.rstrip("s"): int(number) for number, what in _COUNT.findall(lines[-1])}
    return Counts(
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        skipped=counts.get("skipped", 0),
        told=told,
    )
