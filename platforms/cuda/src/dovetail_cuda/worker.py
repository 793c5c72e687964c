"""The CUDA worker: the accelerator worker with the device runtime of CUDA."""

from __future__ import annotations

from typing import ClassVar

from dovetail_torch.accelerator.worker import AcceleratorWorker


class CUDAWorker(AcceleratorWorker):
    """Runs the model on one CUDA device."""

    provides: ClassVar[frozenset[str]] = AcceleratorWorker.provides | {"sleep", "custom_all_reduce"}
