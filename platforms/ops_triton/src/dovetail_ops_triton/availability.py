"""Find out whether the ops and the attention backend can use Triton kernels.

This module imports no torch.

The platform checks whether a suitable device exists.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from shutil import which

from dovetail.interfaces import Probe

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
"""Whether kernels run in Triton's interpreter, on the host. Triton reads the environment variable
once."""


def probe() -> Probe:
    """Return whether Triton is installed and can launch kernels. Give advice if it cannot."""
    if find_spec("triton") is None:
        text = "Triton is not installed: install a torch build for accelerators, which includes it"
        return Probe(usable=False, reasons=(text,))
    if INTERPRETED or _has_compiler():
        return Probe(usable=True)
    text = "Triton needs a C compiler to launch kernels, and none was found: install gcc"
    return Probe(usable=False, reasons=(text,))


def _has_compiler() -> bool:
    """Return whether Triton would find a C compiler."""
    return "CC" in os.environ or any(map(which, ("gcc", "clang")))
