"""Checks whether the library is installed, without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from dovetail.interfaces import Probe

MISSING = (
    "The library xgrammar is not installed. Install "
    "dovetail-structured-output-xgrammar[xgrammar], or choose another grammar_backend."
)


def probe() -> Probe:
    """Return whether the library can be found."""
    usable = find_spec("xgrammar") is not None
    return Probe(usable=usable, reasons=() if usable else (MISSING,))
