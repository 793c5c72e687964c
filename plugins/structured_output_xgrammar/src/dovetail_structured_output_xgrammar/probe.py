"""Whether the library is installed. Imports nothing of it."""

from __future__ import annotations

from importlib.util import find_spec

from dovetail.interfaces import Probe


def probe() -> Probe:
    """Return whether the library can be imported."""
    if find_spec("xgrammar") is None:
        reason = "the library xgrammar is not installed; install the extra xgrammar of this plugin"
        return Probe(usable=False, reasons=(reason,))
    return Probe(usable=True)
