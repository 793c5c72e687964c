"""Runs tests of Triton kernels in Triton's interpreter, in a separate process.

When kernels are decorated, Triton decides for the whole process whether they are interpreted. A
package therefore has these tests in files `interpreted_*.py`, which a normal test run does not
collect. One test of the normal run starts them with this module and checks the number of passed
tests. This module does not depend on Triton or on kernels. The interpreter computes on the host, in
numpy. It is slow, and its bfloat16 results differ from those of a device: the sums of two bfloat16
numbers are wrong.
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
"""Module whose numpy warnings about infinities are ignored, because a device does not warn."""
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of tests by outcome. failed: includes errors. output: all output of pytest."""

    passed: int
    failed: int
    skipped: int
    output: str


def run_interpreted(
    folder: Path, *plugins: str, timeout_s: float, complete: bool = False
) -> Counts:
    """Run the tests in `folder` in the interpreter, and return the numbers of tests by outcome.

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
    output = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if _COUNT.search(line)]
    if not lines:
        raise AssertionError(
            f"pytest printed no counts for the interpreted tests of {folder}:\n{output}"
        )
    counts = {what.rstrip("s"): int(number) for number, what in _COUNT.findall(lines[-1])}
    return Counts(
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        skipped=counts.get("skipped", 0),
        output=output,
    )
