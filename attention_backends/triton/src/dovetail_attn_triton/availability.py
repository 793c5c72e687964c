"""Whether Triton is there, and whether it interprets: asked before the backend is chosen.

Imports neither Triton nor torch.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from shutil import which

from dovetail.interfaces import Probe

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}
"""Whether kernels run in Triton's interpreter, on the CPU: for tests, thousands of times slower.

Triton looks at the same variable when a kernel is defined, so it holds for the whole process.
"""


def probe() -> Probe:
    """Return whether Triton can start kernels, and if not, what would help."""
    if find_spec("triton") is None:
        reason = (
            "Triton is not installed; torch's builds for GPUs bring it, or `pip install triton`"
        )
        return Probe(usable=False, reasons=(reason,))
    if INTERPRETED or _has_compiler():
        return Probe(usable=True)
    reason = "Triton builds what starts a kernel with a C compiler, and there is none: install gcc"
    return Probe(usable=False, reasons=(reason,))


def _has_compiler() -> bool:
    """Return whether there is one where Triton looks for it."""
    return "CC" in os.environ or any(map(which, ("gcc", "clang")))
