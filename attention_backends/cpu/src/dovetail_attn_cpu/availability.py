"""Checks whether the native library is available, before selection.

This module does not import torch.
"""

from __future__ import annotations

from dovetail.interfaces import Probe
from dovetail_cpu_kernels import status


def probe() -> Probe:
    """Return whether the native library can be loaded, and if not, why."""
    kernel_status = status()
    if kernel_status.available:
        return Probe(usable=True)
    return Probe(
        usable=False, reasons=(f"the native library cannot be loaded: {kernel_status.reason}",)
    )
