"""Reasons why this torch build, this machine or a GPU cannot run FlashInfer's kernels.

This module imports torch, not FlashInfer.
"""

from __future__ import annotations

import torch

from dovetail_attn_flashinfer.availability import compiler_reasons
from dovetail_attn_flashinfer.device_facts import device_facts

LEAST_CAPABILITY = 80


def is_rocm(architecture: str = "") -> bool:
    """Return whether the assumed device, or this torch build, is AMD's."""
    return not architecture.startswith("sm_") if architecture else torch.version.hip is not None


def build_reasons(*, rocm: bool, backend: str) -> list[str]:
    """Return the reasons why this torch build or this machine has no usable kernels.

    rocm: whether the device is AMD's. backend: the option that selects torch operations instead.
    """
    reasons = list(compiler_reasons())
    if rocm:
        reasons.insert(
            0,
            "torch is built for ROCm, which the kernels do not support; install a torch build for "
            f"CUDA, or choose {backend}",
        )
    return reasons


def device_reasons(architecture: str, *, backend: str) -> list[str]:
    """Return the reasons why a GPU is not supported.

    architecture: "" for the GPU of this process. backend: as for `build_reasons`.
    """
    if architecture:
        capability = int(architecture.removeprefix("sm_"))
    else:
        capability = device_facts(torch.device("cuda", torch.cuda.current_device())).capability
    if capability >= LEAST_CAPABILITY:
        return []
    return [
        f"the GPU has compute capability {capability / 10}; the kernels need "
        f"{LEAST_CAPABILITY / 10} (Ampere) or newer. Choose {backend}"
    ]
