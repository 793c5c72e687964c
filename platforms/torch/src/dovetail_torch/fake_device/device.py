"""The one fake device of a process: its order, its memory, its copies under way and its watch.

torch knows a device by name, process-wide, so there is one; `reset` makes it again for each test.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from random import Random

from dovetail_torch.fake_device.flights import Flights
from dovetail_torch.fake_device.memory import Memory
from dovetail_torch.fake_device.timeline import Timeline
from dovetail_torch.fake_device.watch import Watch

TOTAL_BYTES = 64 << 20
"""What the device has, unless a test says otherwise. It is the host's, and really taken."""


class FakeDevice:
    """What tests set and ask.

    num_devices: what the device module counts; there is one, or none.
    """

    def __init__(self) -> None:
        self.num_devices = 1
        self.watch = Watch()
        self.flights = Flights(self.watch)
        self.timeline = Timeline(self._settle, self._wait)
        self.memory = Memory(self.timeline, self.watch, TOTAL_BYTES)

    def reset(
        self, *, total_bytes: int = TOTAL_BYTES, lag: int | None = None, seed: int = 0
    ) -> None:
        """Wait for everything, and begin again; tensors that are there stay, and are counted.

        lag: an event is past by itself after at most so many later operations, drawn with `seed`;
        None for only when it is waited for.
        """
        self.timeline.learn_all()
        self.watch.forget()
        self.num_devices = 1
        self.timeline.lag, self.timeline.random = lag, Random(seed)
        memory = self.memory
        memory.total_bytes, memory.outside_bytes = total_bytes, 0
        memory.reserved_bytes = memory.peak_bytes = memory.allocated_bytes

    def check(self) -> None:
        """Wait for everything; raise FlightError if memory in flight was touched since `reset`."""
        self.timeline.learn_all()
        self.watch.check(again=True)

    def strict(self) -> AbstractContextManager[None]:
        """Let hidden synchronisations of this thread raise HiddenWaitError while a block runs."""
        return self.watch.strict()

    def synchronises(self, what: str) -> None:
        """Do what an operation does that waits for its stream, which is the current one."""
        self.watch.synchronises(what)
        self.timeline.learn(self.timeline.current.moment())

    def _settle(self) -> None:
        self.flights.settle(self.timeline)

    def _wait(self) -> None:
        self.watch.waits += 1


DEVICE = FakeDevice()
