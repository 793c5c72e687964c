"""Checks whether the native library is available, before selection.

This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from dovetail.interfaces import Probe
from dovetail_cpu_kernels import LEVELS, status
from dovetail_cpu_kernels.library import LEVEL_VARIABLE


def probe() -> Probe:
    """Return whether the native kernels can be used and are faster than torch, and if not, why.

    Portable kernels (all of ARM64) are slower than torch's attention and are used only if
    DOVETAIL_CPU_LEVEL selects them.
    """
    reasons = missing_reasons()
    if reasons:
        return Probe(usable=False, reasons=reasons)
    if status().level != LEVELS[0] or os.environ.get(LEVEL_VARIABLE):
        return Probe(usable=True)
    return Probe(
        usable=False,
        reasons=(
            "this processor has only portable kernels, whose attention is slower than torch's; "
            f"to use them anyway, set {LEVEL_VARIABLE}={LEVELS[0]}",
        ),
    )


def missing_reasons() -> Sequence[str]:
    """Return why the native library cannot be loaded, or ()."""
    kernel_status = status()
    if kernel_status.available:
        return ()
    return (f"the native library cannot be loaded: {kernel_status.reason}",)
