"""The channel to an engine's process: converts calls, replies and outputs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from dovetail.config import EngineConfig
from dovetail.engine.channel import (
    Call,
    Channel,
    EngineFacts,
    EngineState,
    Progress,
    Received,
    Reply,
)
from dovetail.engine.operation import PackedRequest, pack_request
from dovetail.engine.process.boot import INPUT_SOCKET
from dovetail.engine.process.link import EngineLink
from dovetail.engine.process.outgoing import ACKNOWLEDGE_EVERY
from dovetail.errors import DovetailError, EngineDeadError, RequestError
from dovetail.interfaces import PauseScope
from dovetail.request import EngineCoreRequest
from dovetail.transport import messages
from dovetail.transport.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    FromEngine,
    Heartbeat,
    Outputs,
    Taken,
)
from dovetail.transport.wire_types import encode

_BATCH_BYTES = MAX_MESSAGE_BYTES // 4
_BATCH_REQUESTS = 4096
"""Limits of the requests in one message, in bytes and in number.

They also limit the response, which may contain a rejection of each request."""


class ProcessChannel(Channel):
    """Connects to an engine's process, which this process has started or is attached to.

    link: the sockets to it.
    """

    def __init__(self, link: EngineLink) -> None:
        """Create the channel. link: closed with the channel."""
        self.link = link
        self.facts = EngineFacts(
            config=EngineConfig.model_validate_json(link.ready.config),
            model_info=link.ready.model_info,
            max_model_len=link.ready.max_model_len,
            front_end=link.ready.front_end,
            phases=link.ready.phases,
            cache_bytes=link.ready.cache_bytes,
        )
        self._received: deque[Received] = deque()
        self._calls: dict[int, _Pending] = {}
        self._num_messages = 0
        self._num_taken = 0
        self._counting = threading.Lock()

    def send(self, call: Call) -> None:
        """Send a call. Requests of one call are split into as many messages as needed."""
        operation = call.operation
        if not operation.takes_requests:
            content = operation.encode_arguments(call.arguments)
            self._send(call, [content])
        elif isinstance(call.arguments[0], EngineCoreRequest):
            self._send(call, [encode((pack_request(call.arguments[0]),))])
        else:
            rejected: dict[str, RequestError] = {}
            batches = [encode((batch,)) for batch in _batches(call.arguments[0], rejected)]
            self._send(call, batches, rejected)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next reply or outputs."""
        clock = self.link.clock
        begun_ns = clock.now_ns()
        while not self._received:
            left_s = timeout_s
            if timeout_s is not None:
                left_s = timeout_s - (clock.now_ns() - begun_ns) / 1e9
            message = self.link.receive(left_s)
            if message is None:
                return None
            self._take(message)
        return self._received.popleft()

    def acknowledge(self) -> None:
        """Record that a message was taken. Send one acknowledgment for several messages."""
        with self._counting:  # responses and outputs may be taken in two threads
            self._num_taken += 1
            num_taken = self._num_taken
            if num_taken < ACKNOWLEDGE_EVERY:
                return
            self._num_taken = 0
        with suppress(EngineDeadError):
            self.link.send(Taken(num_taken))

    def close(self) -> None:
        """Shut down the engine if this process has started it. Otherwise detach from it."""
        self.link.close()

    @property
    def error(self) -> DovetailError | None:
        """The error that stopped the engine."""
        return self.link.error

    @property
    def state(self) -> EngineState:
        """Whether the process is alive."""
        return EngineState.DEAD if self.link.has_ended() else EngineState.READY

    @property
    def paused(self) -> PauseScope | None:
        """The scope of the engine's pause."""
        return self.link.heartbeat.paused

    @property
    def progress(self) -> Progress:
        """The progress of the engine."""
        return self.link.progress

    @property
    def process_id(self) -> int:
        """The id of the engine's process."""
        return self.link.pid

    @property
    def address(self) -> str:
        """The path of the engine's socket."""
        return str(self.link.folder / INPUT_SOCKET)

    def _send(
        self, call: Call, contents: Sequence[bytes], rejected: dict[str, RequestError] | None = None
    ) -> None:
        """Send a call in one or more messages. The last response completes the reply."""
        if call.number and not contents:
            self._received.append(Reply(call.number, rejected))
        pending = _Pending(call, len(contents), rejected)
        for content in contents:
            number = 0
            if call.number:
                self._num_messages += 1
                number = self._num_messages
                self._calls[number] = pending
            self.link.send(messages.Call(number, call.operation.name, content))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._received.append(message.columns())
            for reply in message.responses:
                self._answer(reply)
        elif isinstance(message, Answer):
            self._answer(message)
            self.acknowledge()
        elif not isinstance(message, Heartbeat):
            raise EngineDeadError(f"unexpected message {type(message).__name__} from the engine.")

    def _answer(self, outcome: Answer) -> None:
        pending = self._calls.pop(outcome.number, None)
        if pending is not None and (reply := pending.take(outcome)) is not None:
            self._received.append(reply)


class _Pending:
    """A call that waits for responses.

    rejected: the requests rejected so far, in calls that add requests.
    """

    def __init__(self, call: Call, num_left: int, rejected: dict[str, RequestError] | None) -> None:
        self._call = call
        self._num_left = num_left
        self._rejected = rejected

    def take(self, reply: Answer) -> Reply | None:
        """Process a response. Return the reply if it was the last."""
        self._num_left -= 1
        value, error = None, None
        if reply.error is not None:
            error = reply.error.error()
        else:
            value = self._call.operation.decode_result(reply.result)
        if self._rejected is not None and value is not None:
            value = self._rejected = self._rejected | value
        if error is not None:
            self._num_left = 0
        return None if self._num_left else Reply(self._call.number, value, error)


def _batches(
    requests: Sequence[EngineCoreRequest], rejected: dict[str, RequestError]
) -> Iterator[tuple[PackedRequest, ...]]:
    """Yield batches of encoded requests. Record requests that cannot be sent in `rejected`."""
    batch: list[PackedRequest] = []
    num_bytes = 0
    for request in requests:
        try:
            packed = pack_request(request)
        except RequestError as error:
            rejected[request.request_id] = error
            continue
        size = len(packed[1])
        if batch and (num_bytes + size > _BATCH_BYTES or len(batch) >= _BATCH_REQUESTS):
            yield tuple(batch)
            batch, num_bytes = [], 0
        batch.append(packed)
        num_bytes += size
    if batch:
        yield tuple(batch)
