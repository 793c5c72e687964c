"""Reads the state of processes from `/proc`, for tests that count, inspect or kill processes.

No function fails if a process, thread or descriptor disappears during the call.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError)
_LISTENS = "0A"


def children_of(pid: int) -> set[int]:
    """Return the ids of the children that any thread of process `pid` has started.

    Source: `/proc/<pid>/task/<thread>/children`.
    """
    children: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(*_GONE):
            children.update(int(child) for child in path.read_text("ascii").split())
    return children


def state_of(pid: int) -> str:
    """Return the state of process `pid`: "R", "S", "T", "Z", ..., or "" if there is none.

    Source: `/proc/<pid>/stat`.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(") ")[2][:1]
    except _GONE:
        return ""


def is_running(pid: int) -> bool:
    """Return whether process `pid` exists and has not ended. A zombie has ended."""
    return state_of(pid) not in ("", "Z")


def num_threads_of(pid: int) -> int:
    """Return the number of threads in process `pid`, or 0 if it does not exist."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except _GONE:
        return 0


def open_files_of(pid: int) -> list[str]:
    """Return the targets of the descriptors of process `pid`: paths, "socket:[N]", ..."""
    paths = []
    with suppress(*_GONE):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(*_GONE):
                paths.append(os.readlink(descriptor))
    return paths


def tcp_listeners_of(pid: int) -> set[str]:
    """Return the addresses at which process `pid` listens, as "ADDRESS:PORT" in hexadecimal.

    Source: `/proc/<pid>/net/tcp` and `tcp6`.
    """
    sockets = set(open_files_of(pid))
    rows = []
    with suppress(*_GONE):
        for table in ("tcp", "tcp6"):
            rows += Path(f"/proc/{pid}/net/{table}").read_text("ascii").splitlines()[1:]
    columns = [row.split() for row in rows]
    return {
        column[1]
        for column in columns
        if column[3] == _LISTENS and f"socket:[{column[9]}]" in sockets
    }
