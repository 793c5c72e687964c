"""The CPU worker: the torch worker on the CPU platform's runtime."""

from __future__ import annotations

from dovetail_torch.worker import TorchWorker


class CPUWorker(TorchWorker):
    """Runs the model on the cores that this process may use."""
