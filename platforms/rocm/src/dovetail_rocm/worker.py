"""The ROCm worker: an accelerator's worker, on the ROCm platform's runtime."""

from __future__ import annotations

from dovetail_torch.accelerator.worker import AcceleratorWorker


class ROCmWorker(AcceleratorWorker):
    """Runs the model on one AMD device."""
