"""How an engine starts child processes: with exec, by module name, in a session of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

END_TIMEOUT_S = 5.0
"""How long a process that was killed may take to end."""


def start_child(module: str, *args: str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start `python -m module args` with the descriptors, and this process's import path.

    The child has this process's working directory; where that was deleted, the root directory.
    Raises OSError if the system has no process or memory left.
    """
    path = import_path()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *args],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        cwd=None if _working_directory() else os.sep,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )


def import_path() -> list[str]:
    """Return `sys.path` with absolute entries, for another process.

    Relative entries of a deleted working directory are left out: nothing can be imported there.
    """
    here = _working_directory()
    return [os.path.abspath(entry) for entry in sys.path if here or os.path.isabs(entry)]


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a child's session.

    The child is not reaped yet, so that no other process can have its id.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a killed child; give up after END_TIMEOUT_S (it hangs in the kernel then)."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)


def _working_directory() -> str:
    """Return the working directory, or "" if it was deleted or cannot be named."""
    try:
        return os.getcwd()
    except OSError:
        return ""
