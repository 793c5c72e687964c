"""The CPU's worker with a memory of logits: a third party's worker, chosen by `worker_cls`."""

from __future__ import annotations

from dovetail_cpu.worker import CPUWorker
from parity.recording import Recording


class RecordingWorker(Recording, CPUWorker):
    """The CPU worker that remembers."""
