"""Adds requests to the core, for a few milliseconds between two steps.

Running requests therefore continue, however many new requests arrive together. Requests that
arrive together while nothing runs are all added before the first step. This module does not depend
on sockets or front ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from dovetail.clock import Clock
from dovetail.engine.operation import PackedRequest
from dovetail.errors import DovetailError, EngineDeadError, MessageError, RequestError
from dovetail.request import EngineCoreRequest
from dovetail.transport.wire_types import read_request

INTAKE_NS = 8_000_000
"""How long messages are read between two steps; the last request may take longer."""

Add = Callable[[EngineCoreRequest], None]
Done = Callable[[dict[str, RequestError]], None]


@dataclass
class _Batch:
    """Requests that arrived together.

    add: a function that adds one request to the core. done: a function that gets the rejections, by
    id, when all are added.
    holds_steps: whether all must be added before the next step.
    """

    requests: Iterator[PackedRequest]
    add: Add
    done: Done
    holds_steps: bool
    rejected: dict[str, RequestError] = field(default_factory=dict)


class RequestIntake:
    """Adds requests to a core, in time slices between its steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end_ns = 0
        self._batch: _Batch | None = None
        # Decoded, but not yet added: decoding and adding may each take tens of milliseconds.
        self._was_read: EngineCoreRequest | None = None

    def begin_time_slice(self) -> None:
        """Begin a time slice of `INTAKE_NS`."""
        self._end_ns = self._clock.now_ns() + INTAKE_NS

    @property
    def is_over(self) -> bool:
        """Whether the time slice is over: other messages wait for the next one."""
        return self._clock.now_ns() >= self._end_ns

    def begin_batch(
        self, requests: Iterable[PackedRequest], add: Add, done: Done, *, holds_steps: bool
    ) -> None:
        """Register requests that arrived together. See `_Batch`. `proceed` adds them."""
        self._batch = _Batch(iter(requests), add, done, holds_steps)

    def proceed(self) -> None:
        """Add waiting requests until the time slice is over."""
        batch = self._batch
        if batch is None:
            return
        self._add_read(batch)
        for request_id, content in batch.requests:
            self._attempt(batch, request_id, partial(self._read, request_id, content))
            if not self.is_over:
                self._add_read(batch)
            if self.is_over:
                return
        self._batch = None
        batch.done(batch.rejected)

    @property
    def holds_steps(self) -> bool:
        """Whether the next step waits for requests that arrived together while nothing ran."""
        return self._batch is not None and self._batch.holds_steps

    @property
    def is_waiting(self) -> bool:
        """Whether a request is not added yet. Later messages must wait for it."""
        return self._batch is not None

    def _read(self, request_id: str, content: bytes) -> None:
        """Decode a request, which is added next."""
        request = read_request(content)
        if request.request_id != request_id:
            raise MessageError(
                f"the request id {request.request_id!r} differs from the id in its message."
            )
        self._was_read = request

    def _add_read(self, batch: _Batch) -> None:
        """Add the decoded request, if there is one."""
        request, self._was_read = self._was_read, None
        if request is not None:
            self._attempt(batch, request.request_id, partial(batch.add, request))

    def _attempt(self, batch: _Batch, request_id: str, do: Callable[[], None]) -> None:
        try:
            do()
        except EngineDeadError:
            raise
        except RequestError as error:
            batch.rejected[request_id] = error
        except DovetailError as error:
            batch.rejected[request_id] = RequestError(str(error))
