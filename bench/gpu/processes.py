"""Processes with a deadline, so that one section cannot affect another. Standard library only."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended.

    code: exit code; None if killed at the deadline.
    output: last output lines.
    """

    code: int | None
    seconds: float
    output: str


def run_until(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    deadline_s: float,
    num_lines: int = 12,
    apart: bool = True,
) -> Ended:
    """Run a command in `folder` and kill it at the deadline.

    Its output goes to `folder`/output.txt.

    apart: run the command in a new session, so that its child processes are killed with it;
    otherwise run it in the session of this process.
    """
    log = folder / "output.txt"
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=apart,
        )
        code: int | None
        try:
            code = process.wait(max(deadline_s, 0.0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, apart=apart)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    seconds = time.monotonic() - start
    return Ended(code=code, seconds=seconds, output="\n".join(lines[-num_lines:]))


def _end(process: subprocess.Popen[bytes], *, apart: bool) -> None:
    # The processes may have exited already.
    with suppress(ProcessLookupError):
        if apart:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def python_path(*folders: Path) -> dict[str, str]:
    """Return this process's environment with directories before its PYTHONPATH."""
    parts = [str(folder) for folder in folders]
    current = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*parts, *filter(None, [current])])}
