"""The CPU worker with recorded logits, as a third-party worker selected by `worker_cls`."""

from __future__ import annotations

from dovetail_cpu.worker import CPUWorker
from parity.recording import Recording


class RecordingWorker(Recording, CPUWorker):
    """The CPU worker that records logits."""
