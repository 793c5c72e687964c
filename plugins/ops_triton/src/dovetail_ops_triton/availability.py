"""Whether Triton's kernels can be had: asked before the ops are chosen. Imports no torch.

Whether a device is here on which they run is the platform's to know.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from dovetail.interfaces import Probe

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
"""Whether kernels run in Triton's interpreter, on the host: as Triton reads it, once."""


def probe() -> Probe:
    """Return whether Triton is installed, and if not, where it comes from."""
    if find_spec("triton") is not None:
        return Probe(usable=True)
    text = "Triton is not installed: torch's builds for accelerators bring it"
    return Probe(usable=False, reasons=(text,))
