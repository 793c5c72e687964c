"""Device tensors that are being copied to the host, and the result that is computed from them.

Pinned memory is a ring of slots. Before a slot is reused, its result is computed and stored, even
if it has not been requested. This module does not depend on the meaning of the tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock

import torch

from dovetail.result import ModelRunnerOutput
from dovetail_torch.device_runtime import AsyncDevice, DeviceEvent

NUM_SLOTS = 4
_ALIGNMENT = 16
_NAP_S = 50e-6

Finish = Callable[[Sequence[torch.Tensor]], ModelRunnerOutput]
"""A function that computes the result from the tensors on the host; it must not keep the
tensors."""


class LateOutput:
    """The handle to a step's result. Implements `Handle[ModelRunnerOutput]`. Thread-safe."""

    def __init__(
        self,
        event: DeviceEvent,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        finish: Finish,
    ) -> None:
        """event: complete when `sources`, on the device, have been copied to `targets`."""
        self._event = event
        self._sources = sources  # keeps the memory of the sources until they are copied
        self._targets = targets
        self._finish = finish
        self._lock = Lock()
        self._is_settled = False
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""
        if self._is_settled:
            return True
        try:
            return self._event.query()
        except RuntimeError:  # the device has failed: `result` raises without waiting
            return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait at most `timeout` seconds for the device, and return the result.

        Raises errors of the device, and TimeoutError.
        """
        if timeout is not None and not self._is_settled:
            self._wait(timeout)
        self.settle()
        if self._error is not None:
            raise self._error
        return self._output

    def settle(self) -> None:
        """Wait for the device and release all memory that is shared with other results."""
        with self._lock:
            if self._is_settled:
                return
            try:
                self._event.synchronize()
                self._output = self._finish(self._targets)
            except Exception as error:  # raised by each call of `result`
                self._error = error
            self._sources = self._targets = ()
            self._is_settled = True

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device has not finished a step within {timeout} s.")
            time.sleep(_NAP_S)


class FetchRing:
    """Copies tensors to the host while the device continues. Called from one thread."""

    def __init__(
        self, asynchronous: AsyncDevice, slot_bytes: int, *, num_slots: int = NUM_SLOTS
    ) -> None:
        """slot_bytes: size of each slot. A slot that is too small is replaced, after a wait.

        num_slots: number of slots.
        """
        self._asynchronous = asynchronous
        self._slots = [asynchronous.pinned_zeros(slot_bytes) for _ in range(num_slots)]
        self._owners: list[LateOutput | None] = [None] * num_slots
        self._current = 0

    def fetch(self, sources: Sequence[torch.Tensor], finish: Finish) -> LateOutput:
        """Copy `sources`, contiguous tensors on the device. Return the handle to `finish(copies)`.

        The sources must not be written to from now on.
        """
        self._current = slot = (self._current + 1) % len(self._slots)
        owner = self._owners[slot]
        if owner is not None:
            owner.settle()
        targets = self._targets(slot, sources)
        event = self._asynchronous.fetch(sources, targets)
        output = self._owners[slot] = LateOutput(event, sources, targets, finish)
        return output

    def settle(self) -> None:
        """Wait until all copies in flight are complete."""
        for owner in self._owners:
            if owner is not None:
                owner.settle()

    def _targets(self, slot_index: int, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [source.numel() * source.itemsize for source in sources]
        ends, end = [], 0
        for size in sizes:
            ends.append(end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._slots[slot_index]):
            self._slots[slot_index] = self._asynchronous.pinned_zeros(2 * end)
        slot = self._slots[slot_index]
        return [
            slot[end - size : end].view(source.dtype).view(source.shape)
            for source, size, end in zip(sources, sizes, ends, strict=True)
        ]
