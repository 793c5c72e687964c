"""The interface of a torch device for its worker: the object returned by `Platform.runtime()`.

It contains what the worker and the runner need to know about a platform. A platform returns one
runtime per worker. For other differences (loading weights, memory of the cache) its worker
overrides methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch

from dovetail.errors import PluginError
from dovetail.interfaces import Platform
from dovetail.interfaces.model import RankGroup
from dovetail.plugins.construction import call_plugin

if TYPE_CHECKING:
    from torch.distributed import Store


class DeviceEvent(Protocol):
    """A point in a device's sequence of operations."""

    def query(self) -> bool:
        """Return whether the device has reached the event. Does not wait."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event. Other threads continue meanwhile."""


class AsyncDevice(Protocol):
    """The operations of an asynchronous device that its runner needs in addition to tensors.

    Contract: Work submitted by one thread runs in the order of submission. Host memory that a copy
    reads or writes must not be read or written until an event recorded after the copy is complete.
    """

    def pinned_zeros(self, num_bytes: int) -> torch.Tensor:
        """Return host memory, uint8, zeroed, for asynchronous copies from and to the device."""

    def record(self) -> DeviceEvent:
        """Return an event after all work submitted so far to the computing stream."""

    def fetch(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> DeviceEvent:
        """Copy device tensors to pinned tensors after submitted work, parallel to later work.

        Returns the event after the copies. Until it is complete, the caller must keep the sources
        and not write to them.
        """


class DeviceRuntime(Protocol):
    """The operations of one device that a torch worker uses."""

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Select the device for this thread and process, and return it.

        num_threads: number of compute threads, for devices that compute on the host's cores; None
        for the platform's default.
        """

    def total_memory_bytes(self) -> int:
        """Return the device's memory."""

    def memory_in_use_bytes(self) -> int:
        """Return how much memory is in use, by any process."""

    def reset_peak(self) -> None:
        """Start measuring the peak memory."""

    def peak_bytes(self) -> int:
        """Return the process's peak memory since `reset_peak`, minus its memory at that time."""

    def max_profile_tokens(self) -> int:
        """Return the maximum number of tokens in the step that measures memory.

        The memory of larger steps is extrapolated.
        """

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""

    def asynchronous(self) -> AsyncDevice | None:
        """Return the interface that lets the host run ahead of the device, after `activate`.

        None if each call is synchronous and computes in host memory.
        """

    def join(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> RankGroup:
        """Return the group of the ranks that join at `store`, which has no other users.

        Called only if the platform has the capability "collectives". store: key-value store in
        which the ranks exchange addresses. timeout: maximum duration of joining and of each
        collective operation. Raises RuntimeError if other ranks do not join.
        """


def runtime_of(platform: Platform, worker_cls: type) -> DeviceRuntime:
    """Return the platform's runtime. Raises PluginError if it is not a `DeviceRuntime`."""
    name = platform.info.name
    runtime = call_plugin(f"platform {name!r}", "runtime", platform.runtime)
    if not callable(getattr(runtime, "activate", None)):
        raise PluginError(
            f"The worker {worker_cls.__module__}:{worker_cls.__qualname__} cannot run on the "
            f"platform {name!r}: its runtime() returned {runtime!r:.80}, but a torch worker "
            "needs a DeviceRuntime (dovetail_torch.device_runtime).\n"
            "Choose a worker for this platform, or another platform."
        )
    return cast("DeviceRuntime", runtime)
