"""What a torch worker needs to know about its device: the object behind `Platform.runtime()`.

Where platforms differ for the worker and the runner of this layer; a platform gives one runtime a
worker. What is better done otherwise on one platform (filling weights, the cache's memory), its
worker overrides.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch

from dovetail.interfaces.model import RankGroup

if TYPE_CHECKING:
    from torch.distributed import Store


class DeviceEvent(Protocol):
    """A place in the order of what a device was given."""

    def query(self) -> bool:
        """Return whether the device has come past it; does not wait."""

    def synchronize(self) -> None:
        """Wait until it has. Other threads go on meanwhile."""


class AsyncDevice(Protocol):
    """A device that computes behind the host's back: what its runner needs beside tensors.

    Contract. What one thread gives it is done in that order. Host memory that a copy reads or
    writes is the copy's until an event recorded after it is past: neither is written nor read
    before.
    """

    def pinned_zeros(self, num_bytes: int) -> torch.Tensor:
        """Return host memory, uint8, zeroed, that the device copies from and to by itself."""

    def record(self) -> DeviceEvent:
        """Return an event that comes after everything given so far to the computing stream."""

    def fetch(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> DeviceEvent:
        """Copy device tensors to pinned ones, after what was given so far, beside what comes later.

        Returns the event after the copies. Until it is past the caller keeps the sources and lets
        nobody write to them.
        """


class DeviceRuntime(Protocol):
    """Operations on one device."""

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Take the device for this thread and process, and return it.

        num_threads: of devices that compute on the host's cores; None for the platform's choice.
        """

    def total_memory_bytes(self) -> int:
        """Return the device's memory."""

    def memory_in_use_bytes(self) -> int:
        """Return how much of it is taken, by anybody."""

    def reset_peak(self) -> None:
        """Begin to measure a peak."""

    def peak_bytes(self) -> int:
        """Return the most that this process has had since `reset_peak`, beyond what it had then."""

    def max_profile_tokens(self) -> int:
        """Return how many tokens are worth running to measure a step; the rest is extrapolated."""

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""

    def asynchronous(self) -> AsyncDevice | None:
        """Return what lets the host run ahead of the device, after `activate`.

        None where each call has returned when it is done, in memory that is the host's own.
        """

    def join(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> RankGroup:
        """Return the group of the ranks that meet at `store`; nobody else uses it.

        Asked of platforms with the capability "collectives" and of no others. store: where the
        ranks tell each other their addresses. timeout: of joining and of each exchange. Raises
        RuntimeError where the others do not come.
        """
