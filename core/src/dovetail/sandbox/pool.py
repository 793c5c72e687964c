"""Child processes for one task: started when needed, shared by threads, replaced when they fail.

A pool has several children, so a slow request does not delay other requests. It belongs to the
process that created it; a forked copy of that process starts its own children.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from dovetail.errors import StartError
from dovetail.processes.ownership import on_fork_in_child
from dovetail.sandbox.child import BoundedChild, ChildLimits, ChildTask

MAX_CHILDREN = 4


class ChildPool:
    """Up to `size` children for `task`. Thread-safe. They exit with this process or at `close`."""

    def __init__(self, task: ChildTask, limits: ChildLimits, *, size: int = MAX_CHILDREN) -> None:
        """Create the pool without children."""
        self._task = task
        self._limits = limits
        self._size = size
        self._reset()
        on_fork_in_child(self._reset)

    def call(self, text: bytes, blob: bytes = b"") -> Any:
        """Return the handler's value for a request.

        Raises the errors of `BoundedChild.call`, and StartError if a child cannot be started. If
        all children are busy, the call waits until one has responded or has reached its deadline.
        """
        with self._slots:
            child = self._take()
            try:
                return child.call(text, blob)
            finally:
                self._release(child)

    def start_child(self) -> None:
        """Start a child in a background thread, so that the first call does not wait for it."""
        threading.Thread(target=self._start_child, name="dovetail-sandbox", daemon=True).start()

    def close(self) -> None:
        """Kill all children. Running requests fail. The pool can be used again."""
        self._idle.clear()
        while self._children:
            self._children.pop().close()

    def _reset(self) -> None:
        """Empty the pool. A forked copy starts empty too: the children belong to its parent."""
        self._slots = threading.BoundedSemaphore(self._size)
        self._idle: list[BoundedChild] = []
        self._children: set[BoundedChild] = set()

    def _start_child(self) -> None:
        with suppress(StartError), self._slots:  # the first call raises the error
            self._release(self._take())

    def _take(self) -> BoundedChild:
        while self._idle:
            try:
                child = self._idle.pop()
            except IndexError:  # another thread has taken the child
                break
            if child.is_alive():
                return child
            child.close()
            self._children.discard(child)
        child = BoundedChild(self._task, self._limits)
        self._children.add(child)
        return child

    def _release(self, child: BoundedChild) -> None:
        if child.is_usable:
            self._idle.append(child)
        else:
            self._children.discard(child)
