"""A fake admission gate. A test releases a request by calling `open`.

It asserts that each request arrives once, and that only held requests are released or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.interfaces.admission import AdmissionGate
from dovetail.request import EngineCoreRequest
from dovetail_devkit.expectation import expect


def _everyone(request: EngineCoreRequest) -> bool:
    return True


class FakeGate(AdmissionGate):
    """The fake gate. held: ids of the held requests, in the order of arrival."""

    def __init__(self, wants: Callable[[EngineCoreRequest], bool] = _everyone) -> None:
        """wants: a function that returns whether a request must wait."""
        self.held: list[str] = []
        self._wants = wants
        self._ready: list[str] = []
        self._failed: list[tuple[str, str]] = []

    def open(self, request_id: str) -> None:
        """Release a held request."""
        self._release(request_id)
        self._ready.append(request_id)

    def fail(self, request_id: str, message: str) -> None:
        """Make a held request fail with an error."""
        self._release(request_id)
        self._failed.append((request_id, message))

    def holds(self, request: EngineCoreRequest) -> bool:
        """Hold the request if `wants` returns True."""
        expect(
            request.request_id not in self.held,
            f"holds() of the admission gate was called for {request.request_id} a second time",
        )
        is_held = self._wants(request)
        if is_held:
            self.held.append(request.request_id)
        return is_held

    def take_ready(self) -> Sequence[str]:
        """Return the requests of `open` since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def take_failed(self) -> Sequence[tuple[str, str]]:
        """Return the requests of `fail` since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def forget(self, request_id: str) -> None:
        """Remove the request. It may have been released already."""
        known = {*self.held, *self._ready, *(name for name, _ in self._failed)}
        expect(
            request_id in known,
            f"forget() of the admission gate was called for {request_id}, which was never held",
        )
        self.held = [name for name in self.held if name != request_id]
        self._ready = [name for name in self._ready if name != request_id]
        self._failed = [entry for entry in self._failed if entry[0] != request_id]

    def _release(self, request_id: str) -> None:
        expect(request_id in self.held, f"the gate cannot release {request_id}, which is not held")
        self.held.remove(request_id)
