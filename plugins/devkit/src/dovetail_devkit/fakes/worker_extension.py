"""A fake worker extension."""

from __future__ import annotations

from dovetail.interfaces.worker_extension import WorkerExtension


class FakeWorkerExtension(WorkerExtension):
    """Adds an operation that returns the name of the worker's class."""

    def fake_extension_host(self) -> str:
        """Return the name of the worker's class."""
        return type(self).__name__
