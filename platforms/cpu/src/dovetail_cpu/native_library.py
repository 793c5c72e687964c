"""Find out whether native kernels can be used, and if not, why.

This module does not import torch, because `explain`, `list` and `doctor` call these probes.
"""

from __future__ import annotations

import ctypes
import os
from types import ModuleType

from dovetail.interfaces import Probe

LEVEL_VARIABLE = "DOVETAIL_CPU_LEVEL"
"""Environment variable that selects the instruction set of native kernels, such as "portable"."""
_SLOW_LEVEL = "portable"


def probe_any() -> Probe:
    """Return whether native kernels of any instruction set are available."""
    kernels = _import_kernels()
    if kernels is None:
        return Probe(usable=False, reasons=("dovetail-cpu-kernels is not installed",))
    status = kernels.status()
    if not status.available:
        return Probe(
            usable=False, reasons=(f"the native kernels are not available: {status.reason}",)
        )
    text = (
        f"native kernels for bfloat16 and the instruction set {status.level}; "
        "torch computes on one thread"
    )
    return Probe(usable=True, reasons=(text,))


def probe_fast() -> Probe:
    """Return whether native kernels that are faster than torch are available.

    Portable kernels are slower than torch and are used only if DOVETAIL_CPU_LEVEL selects them.
    """
    probe = probe_any()
    kernels = _import_kernels()
    if kernels is None or not probe.usable or os.environ.get(LEVEL_VARIABLE):
        return probe
    if kernels.status().level != _SLOW_LEVEL:
        return probe
    text = (
        "this processor has only portable kernels, which are slower than torch's; to use "
        f"them anyway, set {LEVEL_VARIABLE}={_SLOW_LEVEL}"
    )
    return Probe(usable=False, reasons=(text,))


def find_library() -> ctypes.CDLL | None:
    """Return the library of native kernels, or None if it is not available."""
    kernels = _import_kernels()
    if kernels is None or not kernels.status().available:
        return None
    return kernels.library()


def _import_kernels() -> ModuleType | None:
    try:
        import dovetail_cpu_kernels
    except ModuleNotFoundError as error:
        # If another module is missing within the package, that is a bug, not "not installed".
        if error.name != "dovetail_cpu_kernels":
            raise
        return None
    return dovetail_cpu_kernels
