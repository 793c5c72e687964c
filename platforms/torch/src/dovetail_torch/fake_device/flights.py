"""Asynchronous copies between host and fake device, and the host memory they use.

Until the host knows that a copy is complete, it must not use the copy's host memory: a source must
not change; a target contains a fixed pattern until the copy is complete. Two copies may read the
same host memory; otherwise only one copy may use it at a time. Only pinned memory can be copied
asynchronously.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from dovetail_torch.fake_device.timeline import Place, Timeline
from dovetail_torch.fake_device.watch import Watch

POISON = 0xA5
"""The byte that fills the target of a copy until the copy is complete."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flight:
    """An incomplete copy. host: the copy's host memory, kept alive. data: the copied bytes."""

    place: Place
    host: torch.Tensor
    data: bytes
    writes: bool

    @property
    def start(self) -> int:
        return self.host.data_ptr()

    def overlaps(self, other: torch.Tensor) -> bool:
        start = other.data_ptr()
        return self.start < start + other.nbytes and start < self.start + self.host.nbytes

    def found(self) -> bytes:
        return ctypes.string_at(self.start, self.host.nbytes)


class Flights:
    """All incomplete asynchronous copies, in the order of submission."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pinned: dict[int, int] = {}
        self._flights: list[_Flight] = []

    def pinned_zeros(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed pinned memory, uint8. The host waits, as on a device."""
        self._watch.synchronizes("allocating pinned memory")
        array = np.zeros(max(1, num_bytes), np.uint8)
        tensor = torch.from_numpy(array)[:num_bytes]
        start = array.ctypes.data
        self._pinned[start] = start + len(array)
        weakref.finalize(array, self._pinned.pop, start)
        return tensor

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Return whether a contiguous host tensor is in pinned memory."""
        start = host.data_ptr()
        end = start + host.nbytes
        return any(first <= start and end <= last for first, last in list(self._pinned.items()))

    def claim(self, host: torch.Tensor, *, writes: bool) -> None:
        """Raise FlightError if a copy to or from `host` would overlap with another copy."""
        for flight in self._flights:
            if (writes or flight.writes) and flight.overlaps(host):
                self._watch.fault(
                    f"a copy {'to' if writes else 'from'} host memory overlaps with a copy on "
                    f"stream {flight.place.stream} that still "
                    f"{'writes' if flight.writes else 'reads'} it; wait for the event of that "
                    "copy, or use other memory."
                )

    def begin_read(self, host: torch.Tensor, moment: Place) -> None:
        """Start a copy from `host`, which is pinned and claimed."""
        data = ctypes.string_at(host.data_ptr(), host.nbytes)
        self._flights.append(_Flight(place=moment, host=host, data=data, writes=False))

    def begin_write(self, host: torch.Tensor, data: bytes, moment: Place) -> None:
        """Start a copy of `data` to the claimed memory `host`. Fill `host` with a pattern."""
        ctypes.memset(host.data_ptr(), POISON, host.nbytes)
        self._flights.append(_Flight(place=moment, host=host, data=data, writes=True))

    def settle(self, timeline: Timeline) -> None:
        """Finish copies that the host knows to be complete.

        Raises FlightError if their memory has changed.
        """
        done = [flight for flight in self._flights if timeline.is_known(flight.place)]
        if not done:
            return
        self._flights = [flight for flight in self._flights if flight not in done]
        touched = [flight for flight in done if not self._complete(flight)]
        for flight in touched:
            kind = "to" if flight.writes else "from"
            self._watch.fault(
                f"a copy {kind} host memory on stream {flight.place.stream} was not complete when "
                "the host wrote to that memory; wait for the copy's event first."
            )

    def _complete(self, flight: _Flight) -> bool:
        """Complete a copy. Return whether its host memory was unchanged until then."""
        content = flight.found()
        if not flight.writes:
            return content == flight.data
        ctypes.memmove(flight.start, flight.data, len(flight.data))
        return content == bytes([POISON]) * len(flight.data)
