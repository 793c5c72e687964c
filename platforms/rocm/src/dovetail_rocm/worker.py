"""The ROCm worker: the accelerator worker with the device runtime of ROCm."""

from __future__ import annotations

from dovetail_torch.accelerator.worker import AcceleratorWorker


class ROCmWorker(AcceleratorWorker):
    """Runs the model on one AMD device."""
