"""How requests enter the core in its process: some milliseconds of them between two steps.

However many come at once, those that run go on in between. Requests that come together while
nothing runs are all taken in before the first step. Knows no socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dovetail.clock import Clock
from dovetail.engine.core import EngineCore
from dovetail.errors import DovetailError, EngineDeadError, MessageError, RequestError
from dovetail.transport.messages import Add, AddTogether, Answer, Refused
from dovetail.transport.wire_types import read_request

INTAKE_NS = 8_000_000
"""How long messages are read between two steps. One more request may begin within it."""


@dataclass
class _Together:
    """Requests that came together. call: what is answered. refused: as the answer lists them."""

    call: int
    requests: Iterator[tuple[str, bytes]]
    refused: list[tuple[str, str, str]] = field(default_factory=list)


class RequestIntake:
    """Takes requests into a core, for one turn of its loop after the other."""

    def __init__(self, core: EngineCore, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._busy = False
        self._end_ns = 0
        self._together: _Together | None = None

    def begin_turn(self) -> None:
        """Begin a turn of the loop: `INTAKE_NS` from now on."""
        self._busy = self._core.has_work()
        self._end_ns = self._clock.now_ns() + INTAKE_NS

    @property
    def is_over(self) -> bool:
        """Whether the turn is over: what else has come waits for the next."""
        return self._clock.now_ns() >= self._end_ns

    def add(self, message: Add) -> Refused | None:
        """Take a request in, or return why not."""
        return self._add(message.request_id, message.request)

    def add_together(self, message: AddTogether) -> None:
        """Begin to take requests in that came together; `go_on` does it."""
        self._together = _Together(message.call, iter(message.requests))

    def go_on(self) -> Answer | None:
        """Take in what came together, as long as the turn lasts; return the answer at its end."""
        together = self._together
        if together is None:
            return None
        for request_id, content in together.requests:
            refused = self._add(request_id, content)
            if refused is not None:
                told = (refused.request_id, refused.reason, refused.parameter)
                together.refused.append(told)
            if self._busy and self.is_over:
                return None
        self._together = None
        return Answer(together.call, together.refused)

    @property
    def is_waiting(self) -> bool:
        """Whether requests that came together are not all in yet; what came later comes later."""
        return self._together is not None

    def _add(self, request_id: str, content: bytes) -> Refused | None:
        try:
            request = read_request(content)
            if request.request_id != request_id:
                raise MessageError(f"the request's own id is {request.request_id!r}.")
            self._core.add_request(request)
        except EngineDeadError:
            raise
        except RequestError as error:
            return Refused(request_id, str(error), error.parameter)
        except DovetailError as error:
            return Refused(request_id, str(error))
        return None
