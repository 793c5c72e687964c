"""Errors that a fake device finds and a real device would not report.

They are hidden waits of the host (`synchronizations`), and uses of memory that an incomplete copy
still uses (`faults`). This module does not depend on tensors or streams: it only receives reports,
and adds the file and line.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from dovetail_torch.fake_device.graphs import FakeGraph

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


class HiddenWaitError(RuntimeError):
    """The host would have waited for the device in code that must not wait."""


class FlightError(RuntimeError):
    """Memory was used or freed while the device still used it."""


class Watch:
    """Findings since the last `forget`. May be called from any thread.

    synchronizations: number of hidden waits, by code line and operation. waits: number of explicit
    waits for an event. faults: messages of all faults, whether raised or not.
    """

    def __init__(self) -> None:
        self.synchronizations: Counter[str] = Counter()
        self.waits = 0
        self.faults: list[str] = []
        self._unraised: list[str] = []
        self._thread = threading.local()

    @property
    def capturing(self) -> FakeGraph | None:
        """The graph that this thread captures, or None."""
        return getattr(self._thread, "graph", None)

    @capturing.setter
    def capturing(self, graph: FakeGraph | None) -> None:
        self._thread.graph = graph

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Raise HiddenWaitError at each synchronization of this thread while the block runs."""
        depth = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        try:
            yield
        finally:
            self._thread.depth = depth

    def synchronizes(self, what: str) -> None:
        """Count a synchronization by `what`, an operation.

        Raises HiddenWaitError if `strict`, and FlightError during a capture.
        """
        self.reject_in_capture(what)
        where = _caller()
        self.synchronizations[f"{where}: {what}"] += 1
        if getattr(self._thread, "depth", 0):
            raise HiddenWaitError(
                f"{where}: {what} makes the host wait for the device, which is not "
                "allowed here; keep the value on the device, or copy it asynchronously "
                "and wait for its event."
            )

    def reject_in_capture(self, what: str) -> None:
        """Raise FlightError if this thread captures a graph, which would not repeat `what`."""
        if self.capturing is not None:
            self.fault(f"{what} is not allowed while a graph is captured.")

    def fault(self, what: str) -> NoReturn:
        """Record a fault and raise it."""
        sentence = f"{_caller()}: {what}"
        self.faults.append(sentence)
        raise FlightError(sentence)

    def note(self, what: str) -> None:
        """Record a fault in code that cannot raise. The next `check` raises it."""
        sentence = f"{_caller()}: {what}"
        self.faults.append(sentence)
        self._unraised.append(sentence)

    def check(self, *, again: bool = False) -> None:
        """Raise FlightError for a fault that was not raised, or with `again` for any fault."""
        faults = self.faults if again else self._unraised
        if faults:
            sentence = faults[0]
            self._unraised.clear()
            raise FlightError(sentence)

    def forget(self) -> None:
        """Delete all findings."""
        self.synchronizations.clear()
        self.waits = 0
        self.faults.clear()
        self._unraised.clear()


def _caller() -> str:
    """Return file and line of the innermost frame outside of torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OWN, _TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
