"""The priority of threads that work in the background."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_LOWEST_PRIORITY = 19


def lower_thread_priority() -> None:
    """Let the calling thread run only when other threads leave a core idle.

    Does nothing on other systems than Linux, or if the system does not permit it.
    """
    if sys.platform != "linux":
        return  # the id of a thread could be that of another process
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
