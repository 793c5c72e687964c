"""Containment: what an import of a plugin may leave behind, and how its failures are reported.

A failed import leaves no half-made modules; what an import prints is kept from the output, which
may be data, and becomes a note. Depends on no plugin; a plugin is still code with all rights.
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
    """Run an import of a plugin in the block; give a list that holds notes on it afterwards.

    If the block raises, the modules of top-level `package` that it added to `sys.modules` are
    taken out again, and those alone: other packages may be in use by now. Only what this thread
    prints is caught. The core's own modules stay.
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
        error.add_note(f"It was importing {package}.")
        if text := printed.getvalue():
            error.add_note(f"While it was imported it printed {_shown(text)}.")
        raise
    took_ns = clock.now_ns() - start_ns
    if text := printed.getvalue():
        notes.append(f"Importing {package} printed {_shown(text)}.")
    if took_ns > SLOW_IMPORT_NS:
        notes.append(f"Importing {package} took {took_ns / 1e9:.1f} s.")


class _Catcher(io.StringIO):
    """Keeps what the thread that made it writes; what other threads write goes on to `beyond`."""

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
