"""The CUDA worker: an accelerator's worker, on the CUDA platform's runtime."""

from __future__ import annotations

from typing import ClassVar

from dovetail_torch.accelerator.worker import AcceleratorWorker


class CUDAWorker(AcceleratorWorker):
    """Runs the model on one CUDA device."""

    provides: ClassVar[frozenset[str]] = AcceleratorWorker.provides | {"sleep", "custom_all_reduce"}
