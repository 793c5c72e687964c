"""A gate that opens when it is told to: the fake of the contract, and a strict one.

It asserts that each request comes once, and that only held requests are let go or forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.interfaces.admission import AdmissionGate
from dovetail.request import EngineCoreRequest
from dovetail_devkit.expectation import expect


def _everyone(request: EngineCoreRequest) -> bool:
    return True


class FakeGate(AdmissionGate):
    """held: ids of the requests that wait here, in the order of their arrival."""

    def __init__(self, wants: Callable[[EngineCoreRequest], bool] = _everyone) -> None:
        """wants: which requests have to wait."""
        self.held: list[str] = []
        self._wants = wants
        self._ready: list[str] = []
        self._failed: list[tuple[str, str]] = []

    def open(self, request_id: str) -> None:
        """Let a held request pass."""
        self._let_go(request_id)
        self._ready.append(request_id)

    def fail(self, request_id: str, message: str) -> None:
        """Let a held request end with an error."""
        self._let_go(request_id)
        self._failed.append((request_id, message))

    def holds(self, request: EngineCoreRequest) -> bool:
        """Hold the request if it is wanted."""
        expect(request.request_id not in self.held, f"{request.request_id} comes a second time")
        wanted = self._wants(request)
        if wanted:
            self.held.append(request.request_id)
        return wanted

    def take_ready(self) -> Sequence[str]:
        """Return whom `open` has named since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def take_failed(self) -> Sequence[tuple[str, str]]:
        """Return whom `fail` has named since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def forget(self, request_id: str) -> None:
        """Hold the request no longer; it may be on its way out already."""
        known = {*self.held, *self._ready, *(name for name, _ in self._failed)}
        expect(request_id in known, f"{request_id} is forgotten, but was not held")
        self.held = [name for name in self.held if name != request_id]
        self._ready = [name for name in self._ready if name != request_id]
        self._failed = [entry for entry in self._failed if entry[0] != request_id]

    def _let_go(self, request_id: str) -> None:
        expect(request_id in self.held, f"{request_id} is let go, but is not held")
        self.held.remove(request_id)
