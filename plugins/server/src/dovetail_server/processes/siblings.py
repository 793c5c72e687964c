"""Questions of an API process to all other API processes, which the main process forwards."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from dovetail_server.processes.messages import Answer, Message, Question, send
from dovetail_server.protocol.errors import unavailable

ANSWER_S = 2.0
"""How long an API process waits for the responses of all others."""

MAX_ID_CHARS = 160
"""Maximum length of a response id. No response has a longer one."""
_IDS_PER_QUESTION = 200


class Siblings:
    """The other API processes, as seen by one of them. channel: the channel to the main process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}

    async def num_running(self) -> int:
        """Return the number of requests of the other API processes.

        Raise APIError if a process does not respond.
        """
        return await self._ask(Question(next(self._numbers), [], False, counts=True))

    async def abort(self, ids: Collection[str], everything: bool) -> int:
        """Abort requests of the other API processes. Return the number of aborted requests.

        Raise APIError if one does not respond.
        """
        possible = [item for item in ids if len(item) <= MAX_ID_CHARS]
        starts = [0] if everything else range(0, len(possible), _IDS_PER_QUESTION)
        num_aborted = 0
        for start in starts:
            chunk = [] if everything else possible[start : start + _IDS_PER_QUESTION]
            num_aborted += await self._ask(Question(next(self._numbers), chunk, everything))
        return num_aborted

    def receive(self, reply: Answer) -> None:
        """Pass the response to the task that waits for it."""
        waiting = self._waiting.get(reply.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply.count)

    async def _ask(self, question: Question) -> int:
        reply = self._waiting[question.number] = asyncio.get_running_loop().create_future()
        try:
            send(self._channel, question)
            return await asyncio.wait_for(reply, ANSWER_S)
        except TimeoutError:
            raise unavailable(
                "Another server process does not respond. Try again later.",
                code="process_unavailable",
            ) from None
        finally:
            del self._waiting[question.number]


@dataclass
class _Open:
    """A question whose responses are incomplete. number: the number of the process that sent it."""

    asker: Asker
    number: int
    missing: set[Asker] = field(default_factory=set)
    count: int = 0


class Asker:
    """A process that asks and answers questions, as seen by the main process."""

    def send(self, message: Message) -> None:
        """Send the process a message."""
        raise NotImplementedError


class Questions:
    """The questions that the main process forwards, until all processes have responded."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}

    def ask(self, asker: Asker, question: Question, others: Iterator[Asker]) -> None:
        """Send a question to `others`."""
        number = next(self._numbers)
        pending = self._open[number] = _Open(asker, question.number, set(others))
        for other in pending.missing:
            other.send(Question(number, question.ids, question.everything, question.counts))
        self._finish(number)

    def answer(self, sender: Asker, reply: Answer) -> None:
        """Add a response."""
        pending = self._open.get(reply.number)
        if pending is not None and sender in pending.missing:
            pending.missing.discard(sender)
            pending.count += reply.count
            self._finish(reply.number)

    def forget(self, ended: Asker) -> None:
        """Stop waiting for responses of a process that has exited."""
        for number, item in list(self._open.items()):
            item.missing.discard(ended)
            self._finish(number)

    def _finish(self, number: int) -> None:
        pending = self._open[number]
        if not pending.missing:
            del self._open[number]
            pending.asker.send(Answer(pending.number, pending.count))
