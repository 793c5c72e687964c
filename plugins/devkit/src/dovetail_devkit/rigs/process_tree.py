"""Child processes of a process, for tests that count or kill them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> set[int]:
    """Return the ids of the children that any thread of process `pid` has started.

    A thread that ends during the call is skipped; a process that has ended has no children.
    Source: `/proc/<pid>/task/<thread>/children`.
    """
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(int(child) for child in path.read_text("ascii").split())
    return found
