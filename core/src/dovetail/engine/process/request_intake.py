"""How requests enter the core in its process: some milliseconds of them between two steps.

However many come at once, those that run go on in between. Requests that come together while
nothing runs are all taken in before the first step. Knows no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dovetail.clock import Clock
from dovetail.engine.core import EngineCore
from dovetail.errors import DovetailError, EngineDeadError, MessageError, RequestError
from dovetail.request import EngineCoreRequest
from dovetail.transport.messages import Add, AddBatch, Answer, Refused
from dovetail.transport.wire_types import read_request

INTAKE_NS = 8_000_000
"""How long messages are read between two steps. One more request may begin within it."""


@dataclass
class _Batch:
    """Requests that came together.

    call: what is answered. holds_steps: whether all are to be in before the next step. refused: as
    the answer lists them.
    """

    call: int
    holds_steps: bool
    requests: Iterator[tuple[str, bytes]]
    refused: list[tuple[str, str, str]] = field(default_factory=list)

    def note(self, refused: Refused | None) -> None:
        """Add to the answer that a request was refused."""
        if refused is not None:
            self.refused.append((refused.request_id, refused.reason, refused.parameter))


class RequestIntake:
    """Takes requests into a core, for one turn of its loop after the other."""

    def __init__(self, core: EngineCore, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._end_ns = 0
        self._batch: _Batch | None = None
        # Decoded, and not yet in the core: each of the two may take tens of milliseconds.
        self._was_read: EngineCoreRequest | None = None

    def begin_turn(self) -> None:
        """Begin a turn of the loop: `INTAKE_NS` from now on."""
        self._end_ns = self._clock.now_ns() + INTAKE_NS

    @property
    def is_over(self) -> bool:
        """Whether the turn is over: what else has come waits for the next."""
        return self._clock.now_ns() >= self._end_ns

    def add(self, message: Add) -> Refused | None:
        """Take a request in, or return why not; one that took long to read waits for `go_on`."""
        refused = self._read_request(message.request_id, message.request)
        return refused if refused is not None or self.is_over else self._add_read()

    def add_batch(self, message: AddBatch) -> None:
        """Begin to take requests in that came together; `go_on` does it."""
        holds_steps = not self._core.has_work()
        self._batch = _Batch(message.call, holds_steps, iter(message.requests))

    def go_on(self) -> Answer | Refused | None:
        """Take in what waits, as long as the turn lasts.

        Returns the answer to requests that came together after the last of them, or why the one
        that came alone is refused.
        """
        batch = self._batch
        if batch is None:
            return self._add_read()
        batch.note(self._add_read())
        for request_id, content in batch.requests:
            batch.note(self._read_request(request_id, content))
            if not self.is_over:
                batch.note(self._add_read())
            if self.is_over:
                return None
        self._batch = None
        return Answer(batch.call, batch.refused)

    @property
    def holds_steps(self) -> bool:
        """Whether the next step waits for requests that came together while nothing ran."""
        return self._batch is not None and self._batch.holds_steps

    @property
    def is_waiting(self) -> bool:
        """Whether something is not in yet; what came later comes later."""
        return self._batch is not None or self._was_read is not None

    def _read_request(self, request_id: str, content: bytes) -> Refused | None:
        """Decode a request, which is then to be added; return why it cannot be."""
        return self._attempt(request_id, lambda: self._keep(request_id, read_request(content)))

    def _keep(self, request_id: str, request: EngineCoreRequest) -> None:
        if request.request_id != request_id:
            raise MessageError(f"the request's own id is {request.request_id!r}.")
        self._was_read = request

    def _add_read(self) -> Refused | None:
        """Add the request that was read, if one was."""
        request, self._was_read = self._was_read, None
        if request is None:
            return None
        return self._attempt(request.request_id, lambda: self._core.add_request(request))

    def _attempt(self, request_id: str, do: Callable[[], None]) -> Refused | None:
        try:
            do()
        except EngineDeadError:
            raise
        except RequestError as error:
            return Refused(request_id, str(error), error.parameter)
        except DovetailError as error:
            return Refused(request_id, str(error))
        return None
