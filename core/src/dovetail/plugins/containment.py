"""Limits the side effects of importing a plugin, and reports them.

A failed import leaves no incomplete modules. Text that an import prints becomes a note, because
stdout may be used for data. This is not a sandbox: a plugin is code with all permissions of the
process.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from dovetail.clock import Clock
from dovetail.errors import describe_failure as describe_failure

SLOW_IMPORT_NS = 1_000_000_000

_OWN_PACKAGE = "dovetail"
_MAX_SHOWN = 120


@contextmanager
def contained(package: str, clock: Clock) -> Iterator[list[str]]:
    """Limit the side effects of an import in the `with` block. Yield a list for notes about it.

    If the block raises, the modules of the top-level `package` that it added to `sys.modules` are
    removed. Other packages and the core's modules stay, because they may be in use. Only output of
    this thread is captured.
    """
    before = frozenset(sys.modules)
    printed = _Catcher(sys.stdout)
    notes: list[str] = []
    start_ns = clock.now_ns()
    try:
        with redirect_stdout(printed):
            yield notes
    except BaseException as error:
        _forget(package, before)
        error.add_note(f"The error occurred while importing {package}.")
        if text := printed.getvalue():
            error.add_note(f"The import of {package} printed {_shown(text)}.")
        raise
    took_ns = clock.now_ns() - start_ns
    if text := printed.getvalue():
        notes.append(f"Importing {package} printed {_shown(text)}.")
    if took_ns > SLOW_IMPORT_NS:
        notes.append(f"Importing {package} took {took_ns / 1e9:.1f} s.")


class _Catcher(io.StringIO):
    """Captures the output of the thread that created it. Other threads' output goes to `beyond`."""

    def __init__(self, beyond: TextIO) -> None:
        super().__init__()
        self._beyond = beyond
        self._owner = threading.get_ident()

    def write(self, text: str, /) -> int:
        if threading.get_ident() == self._owner:
            return super().write(text)
        return self._beyond.write(text)


def _forget(package: str, before: frozenset[str]) -> None:
    if package in ("", "__main__", _OWN_PACKAGE):
        return
    added = [name for name in sys.modules if name not in before]
    for name in added:
        if name != package and not name.startswith(f"{package}."):
            continue
        module = sys.modules.pop(name)
        parent, _, last = name.rpartition(".")
        holder = sys.modules.get(parent)
        if holder is not None and vars(holder).get(last) is module:
            delattr(holder, last)


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…")
