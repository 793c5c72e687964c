"""The interface of device graphs: recorded device operations that are replayed in one call.

The inputs of a graph are at fixed addresses, and its outputs are overwritten by each replay. This
module does not depend on models or devices.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class ReplayableGraph(Protocol):
    """One captured graph."""

    def replay(self) -> None:
        """Submit the operations of the graph. The host does not wait."""


class GraphCapture(Protocol):
    """Captures graphs on one device, from one thread."""

    def capturing(self) -> AbstractContextManager[None]:
        """Prepare captures, which are allowed in the block only."""

    def begin(self) -> None:
        """Begin a graph. Operations are recorded until `end` and are not executed."""

    def end(self) -> ReplayableGraph:
        """Return the graph of the operations since `begin`. Raise RuntimeError if it is invalid."""

    def memory_bytes(self) -> int:
        """Return the device memory that this process has reserved."""
