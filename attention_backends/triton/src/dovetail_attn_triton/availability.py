"""Whether Triton is there, and whether it interprets: asked before the backend is chosen.

Imports neither Triton nor torch.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from dovetail.interfaces import Probe

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}
"""Whether kernels run in Triton's interpreter, on the CPU: for tests, thousands of times slower.

Triton looks at the same variable when a kernel is defined, so it holds for the whole process.
"""


def probe() -> Probe:
    """Return whether Triton can be imported, and if not, what would help."""
    if find_spec("triton") is not None:
        return Probe(usable=True)
    reason = "Triton is not installed; torch's builds for GPUs bring it, or `pip install triton`"
    return Probe(usable=False, reasons=(reason,))
