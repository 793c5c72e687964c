"""The child process of a download: sets its limits, then executes pip.

Run as a file: pip_child.py PARENT_PID ARGUMENT… The kernel ends the process when its parent exits,
and limits its memory; both also apply after `execv`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

MAX_BYTES = 4 << 30
"""Limit of the address space of the download process, in bytes."""
_PR_SET_PDEATHSIG = 1


def limit_child(parent: int) -> bool:
    """Limit the memory of this process, and end it when the process `parent` exits.

    Returns False if `parent` has exited already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    return os.getppid() == parent


def main() -> None:
    """Set the limits, then replace this process with pip."""
    parent, *arguments = sys.argv[1:]
    if limit_child(int(parent)):
        os.execv(sys.executable, [sys.executable, "-P", "-m", "pip", *arguments])


if __name__ == "__main__":
    main()
