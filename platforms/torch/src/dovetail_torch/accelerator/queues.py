"""The streams of an asynchronous device: one computes, another copies results to the host.

This module implements `dovetail_torch.device_runtime.AsyncDevice` for any device module with
torch's API of streams and events. This module contains no device names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail_torch.device_runtime import DeviceEvent

PinnedZeros = Callable[[int], torch.Tensor]
"""A function that returns zeroed pinned host memory of the given number of bytes, uint8."""


class AcceleratorQueues:
    """The current stream of the thread, which computes, and a second stream for copies to the host.

    Work is submitted from one thread; any thread may wait for events.
    """

    def __init__(self, module: Any, pinned_zeros: PinnedZeros) -> None:
        """module: the device's torch module, after `activate`. pinned_zeros: allocates memory."""
        self.pinned_zeros = pinned_zeros
        self._module = module
        self._copies = module.Stream()

    def record(self) -> DeviceEvent:
        """Return an event after all work submitted so far to the computing stream."""
        event: DeviceEvent = self._module.current_stream().record_event()
        return event

    def fetch(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> DeviceEvent:
        """Copy device tensors to pinned tensors after submitted work, parallel to later work.

        Each target has its source's shape and dtype. Until the returned event is complete, the
        caller must keep the sources and not write to them: the allocator could reuse their memory
        for later work of the computing stream, which does not wait for the copies.
        """
        copies = self._copies
        copies.wait_stream(self._module.current_stream())
        with self._module.stream(copies):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        event: DeviceEvent = copies.record_event()
        return event
