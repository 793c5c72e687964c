"""The order of operations on a fake device: streams, events, and what the host knows.

The timeline computes no results; it numbers the operations of each stream. Their order is stored in
vector clocks (Fidge 1988; Mattern 1989). The order includes the host: work that it has waited for
comes before all work that it submits later. An event is complete when the host synchronizes, or
when the host queries it after `lag` later operations. This module does not depend on tensors or
memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

Clock = dict[int, int]
"""Number of operations, by stream number."""


class Place(NamedTuple):
    """An operation: the index of its stream, and its own index on that stream, from 1."""

    stream: int
    number: int


def _merge(into: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > into.get(stream, 0):
            into[stream] = number


class Timeline:
    """All streams of a device and the host.

    lock: held while the order is read or changed. known: operations known to be complete. lag:
    maximum number of later operations after which an event is complete; None for never. settle:
    function that is called, while the lock is held, whenever `known` has grown. waiting: function
    that is called before the host waits for an event or a stream.
    """

    def __init__(self, settle: Callable[[], None], waiting: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.known: Clock = {}
        self.lag: int | None = None
        self.random = Random(0)
        self.num_operations = 0
        self.waiting = waiting
        self._settle = settle
        self._streams: list[Stream] = []
        self._thread = threading.local()
        self.default = Stream(self)

    def add(self, stream: Stream) -> int:
        """Add a new stream and return its number."""
        with self.lock:
            self._streams.append(stream)
            return len(self._streams) - 1

    @property
    def current(self) -> Stream:
        """The stream to which this thread submits its operations."""
        stream: Stream = getattr(self._thread, "stream", self.default)
        return stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current one of this thread while the block runs."""
        before = self.current
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def learn(self, moment: Clock) -> None:
        """Record that the host knows all operations up to `moment` to be complete."""
        with self.lock:
            _merge(self.known, moment)
            self._settle()

    def learn_all(self) -> None:
        """Record that the host knows all operations to be complete."""
        for stream in self._streams:
            self.learn(stream.moment())

    def is_known(self, moment: Place) -> bool:
        """Return whether the host knows an operation to be complete."""
        return moment.number <= self.known.get(moment.stream, 0)

    def is_before(self, moment: Place, stream: Stream) -> bool:
        """Return whether an operation comes before the next operation of `stream`."""
        own = moment.stream == stream.number
        return own or moment.number <= stream.before.get(moment.stream, 0) or self.is_known(moment)


class Stream:
    """A stream, like `torch.cuda.Stream`.

    before: for each stream, the number of its last operation that ends before the next operation of
    this stream starts.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.before: Clock = {}
        self.num_given = 0
        self.timeline = timeline
        self.number = timeline.add(self)

    def give(self) -> Place:
        """Add an operation and return its position in the order."""
        self.num_given += 1
        self.timeline.num_operations += 1
        return Place(self.number, self.num_given)

    def moment(self) -> Clock:
        """Return the clock of all operations submitted so far."""
        with self.timeline.lock:
            return self.before | {self.number: self.num_given}

    def wait_event(self, event: Event) -> None:
        """Order later operations of this stream after the event."""
        with self.timeline.lock:
            _merge(self.before, event.moment)

    def wait_stream(self, stream: Stream) -> None:
        """Order later operations of this stream after the current operations of `stream`."""
        with self.timeline.lock:
            _merge(self.before, stream.moment())

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new event, after the operations submitted so far, and return it."""
        event = event or Event(self.timeline)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait until all operations submitted so far are complete."""
        self.timeline.waiting()
        self.timeline.learn(self.moment())


class Event:
    """A point in the order of a device. An event that is not recorded is complete."""

    def __init__(self, timeline: Timeline) -> None:
        self.moment: Clock = {}
        self._timeline = timeline
        self._ready_at = 0

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after all operations submitted to `stream`, or to the current stream."""
        timeline = self._timeline
        with timeline.lock:
            self.moment = (stream or timeline.current).moment()
            maximum = timeline.lag or 0
            self._ready_at = timeline.num_operations + timeline.random.randint(0, maximum)

    def wait(self, stream: Stream | None = None) -> None:
        """Order later operations of `stream`, or of the current stream, after the event."""
        (stream or self._timeline.current).wait_event(self)

    def query(self) -> bool:
        """Return whether the event is complete."""
        timeline = self._timeline
        with timeline.lock:
            if all(timeline.is_known(Place(*item)) for item in self.moment.items()):
                return True
            if timeline.lag is None or timeline.num_operations < self._ready_at:
                return False
            timeline.learn(self.moment)
            return True

    def synchronize(self) -> None:
        """Wait until the event is complete."""
        self._timeline.waiting()
        self._timeline.learn(self.moment)
