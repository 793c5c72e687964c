"""The XPU worker: the accelerator worker with the device runtime of XPU."""

from __future__ import annotations

from dovetail_torch.accelerator.worker import AcceleratorWorker


class XPUWorker(AcceleratorWorker):
    """Runs the model on one XPU."""
