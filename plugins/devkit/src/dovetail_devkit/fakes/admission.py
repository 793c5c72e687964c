"""A fake admission gate that holds every request until the second poll after its arrival."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.admission import AdmissionContext
from dovetail.request import EngineCoreRequest
from dovetail_devkit.expectation import expect
from dovetail_devkit.scheduler.gate import FakeGate


class FakeAdmissionGate(FakeGate):
    """Releases each request at the second poll. It checks its caller, as `FakeGate` does."""

    def __init__(self, context: AdmissionContext) -> None:
        super().__init__()
        self.context = context
        self._is_shut_down = False

    def holds(self, request: EngineCoreRequest) -> bool:
        """Hold the request. Raise AssertionError after `shutdown`."""
        expect(not self._is_shut_down, "holds() was called after shutdown()")
        return super().holds(request)

    def take_ready(self) -> Sequence[str]:
        """Return the requests that were held at the previous call."""
        ready = super().take_ready()
        for request_id in tuple(self.held):
            self.open(request_id)
        return ready

    def shutdown(self) -> None:
        """Make later calls of `holds` fail."""
        self._is_shut_down = True
