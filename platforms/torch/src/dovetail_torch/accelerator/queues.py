"""Work for a device that computes behind the host's back: its copies to the host go beside.

Implements `dovetail_torch.device_runtime.AsyncDevice` over any device module with torch's surface
of streams and events. Depends on no device's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail_torch.device_runtime import DeviceEvent

PinnedZeros = Callable[[int], torch.Tensor]
"""Gives so many bytes of pinned host memory: uint8, zeroed."""


class AcceleratorQueues:
    """The stream that computes, which is the thread's current one, and one for copies to the host.

    Work comes from one thread; events may be waited for in any.
    """

    def __init__(self, module: Any, pinned_zeros: PinnedZeros) -> None:
        """module: the device's, of torch; made after it was taken. pinned_zeros: its memory."""
        self.pinned_zeros = pinned_zeros
        self._module = module
        self._copies = module.Stream()

    def record(self) -> DeviceEvent:
        """Return an event that comes after everything given so far to the computing stream."""
        event: DeviceEvent = self._module.current_stream().record_event()
        return event

    def fetch(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> DeviceEvent:
        """Copy device tensors to pinned ones, after what was given so far, beside what comes later.

        Each target has its source's shape and dtype. Until the event that is returned is past, the
        caller keeps the sources and lets nobody write to them: the allocator would give their
        memory to later work of the computing stream, which does not wait for this one.
        """
        copies = self._copies
        copies.wait_stream(self._module.current_stream())
        with self._module.stream(copies):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        event: DeviceEvent = copies.record_event()
        return event
