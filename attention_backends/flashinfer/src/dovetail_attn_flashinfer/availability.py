"""Find out whether FlashInfer can be used. This module imports neither torch nor FlashInfer.

An import of FlashInfer takes seconds, so the version is read from the package metadata.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from dovetail.interfaces import Probe

DISTRIBUTION = "flashinfer-python"
SERIES = (0, 7)
INSTALL = "pip install 'dovetail-attn-flashinfer[flashinfer]'"

DEFAULT_CUDA = Path("/usr/local/cuda")
"""The last directory in which FlashInfer looks for the CUDA toolkit."""

COMPILED_KERNELS = "flashinfer_jit_cache"
"""The package with compiled kernels. FlashInfer compiles the kernels that it does not contain."""


def probe() -> Probe:
    """Return whether a supported version of FlashInfer is installed; give advice if it is not."""
    try:
        result = version(DISTRIBUTION)
    except PackageNotFoundError:
        return _unusable(f"{DISTRIBUTION} is not installed: run {INSTALL}")
    if series(result) != SERIES:
        expected = ".".join(map(str, SERIES))
        return _unusable(
            f"{DISTRIBUTION} {result} is installed, but the plugin supports {expected}.x only: "
            f"run {INSTALL}"
        )
    return Probe(usable=True)


def probe_ops() -> Probe:
    """Return whether FlashInfer and its kernels, or a compiler for them, are installed."""
    reasons = (*probe().reasons, *compiler_reasons())
    return Probe(usable=not reasons, reasons=reasons)


def compiler_reasons() -> tuple[str, ...]:
    """Return why FlashInfer would find neither kernels nor a compiler for them, or ()."""
    if has_kernels():
        return ()
    package = COMPILED_KERNELS.replace("_", "-")
    return (
        "FlashInfer compiles its kernels, but no CUDA compiler was found: install the CUDA toolkit "
        f"and set CUDA_HOME, or install {package}",
    )


def _unusable(reason: str) -> Probe:
    return Probe(usable=False, reasons=(reason,))


def series(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version such as "0.7.2.post1"."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def has_kernels() -> bool:
    """Return whether kernels are installed, or FlashInfer would find a CUDA compiler for them."""
    if find_spec(COMPILED_KERNELS) is not None:
        return True
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(named or which("nvcc") or DEFAULT_CUDA.exists())
