"""The XPU worker: an accelerator's worker, on the XPU platform's runtime."""

from __future__ import annotations

from dovetail_torch.accelerator.worker import AcceleratorWorker


class XPUWorker(AcceleratorWorker):
    """Runs the model on one XPU."""
