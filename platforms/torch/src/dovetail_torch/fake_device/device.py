"""The fake device of a process: its timeline, memory, asynchronous copies and watch.

A process has one fake device, because torch registers it by name. `reset` reinitializes it for each
test.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from random import Random

from dovetail_torch.fake_device.flights import Flights
from dovetail_torch.fake_device.memory import Memory
from dovetail_torch.fake_device.timeline import Timeline
from dovetail_torch.fake_device.watch import Watch

TOTAL_BYTES = 64 << 20
"""The default memory size of the device. It is allocated on the host."""


class FakeDevice:
    """The fake device as tests use it. num_devices: what the device module reports, 1 or 0."""

    def __init__(self) -> None:
        self.num_devices = 1
        self.watch = Watch()
        self.flights = Flights(self.watch)
        self.timeline = Timeline(self._settle, self._wait)
        self.memory = Memory(self.timeline, self.watch, TOTAL_BYTES)

    def reset(
        self, *, total_bytes: int = TOTAL_BYTES, lag: int | None = None, seed: int = 0
    ) -> None:
        """Wait for all work and reset the device.

        Existing tensors remain valid and are still counted.
        lag: maximum number of later operations after which an event is complete; the number is
        random, from `seed`. With None, an event is complete only when the host waits for it.
        """
        self.timeline.learn_all()
        self.watch.forget()
        self.num_devices = 1
        self.timeline.lag, self.timeline.random = lag, Random(seed)
        memory = self.memory
        memory.total_bytes, memory.outside_bytes = total_bytes, 0
        memory.reserved_bytes = memory.peak_bytes = memory.allocated_bytes

    def check(self) -> None:
        """Wait for all work.

        Raises FlightError if memory of an incomplete copy was used since `reset`.
        """
        self.timeline.learn_all()
        self.watch.check(again=True)

    def strict(self) -> AbstractContextManager[None]:
        """Raise HiddenWaitError for hidden synchronizations of this thread while a block runs."""
        return self.watch.strict()

    def synchronizes(self, what: str) -> None:
        """Simulate an operation that waits for the current stream."""
        self.watch.synchronizes(what)
        self.timeline.learn(self.timeline.current.moment())

    def _settle(self) -> None:
        self.flights.settle(self.timeline)

    def _wait(self) -> None:
        self.watch.reject_in_capture("a wait for an event or a stream")
        self.watch.waits += 1


DEVICE = FakeDevice()
