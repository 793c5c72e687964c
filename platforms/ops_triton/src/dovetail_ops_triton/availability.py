"""Whether Triton can start kernels: for these ops and for attention. Imports no torch.

Whether a device is here on which they run is the platform's to know.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from shutil import which

from dovetail.interfaces import Probe

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
"""Whether kernels run in Triton's interpreter, on the host: as Triton reads it, once."""


def probe() -> Probe:
    """Return whether Triton is installed and can start kernels, and if not, what would help."""
    if find_spec("triton") is None:
        text = "Triton is not installed: torch's builds for accelerators bring it"
        return Probe(usable=False, reasons=(text,))
    if INTERPRETED or _has_compiler():
        return Probe(usable=True)
    text = "Triton builds what starts a kernel with a C compiler, and there is none: install gcc"
    return Probe(usable=False, reasons=(text,))


def _has_compiler() -> bool:
    """Return whether there is one where Triton looks for it."""
    return "CC" in os.environ or any(map(which, ("gcc", "clang")))
