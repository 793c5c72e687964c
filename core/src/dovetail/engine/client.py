"""The clients of an engine: one for a thread, and one for an event loop.

Both are derived from the declarations in `dovetail.engine.port` and work with every channel. They
transfer requests and columns, without text or tokenizer. The same calls give the same outputs
through every client.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from dovetail.engine.channel import (
    Call,
    Channel,
    EngineFacts,
    EngineState,
    InprocChannel,
    Progress,
    Received,
    Reply,
)
from dovetail.engine.core import EngineCore
from dovetail.engine.operation import Operation
from dovetail.engine.port import EnginePort
from dovetail.errors import DovetailError, EngineDeadError, UnavailableError
from dovetail.interfaces import EngineCoreOutputs, PauseScope
from dovetail.processes.ownership import finalize_in_owner, on_fork_in_child

V = TypeVar("V")

_SHORT_NAP_S = 0.005
_NAP_S = 0.2
"""How long the reading thread may take to notice that it must stop."""


class BaseClient(EnginePort):
    """The status of the engine, for both clients. Makes no call to it. Any thread may read it."""

    def __init__(self, channel: Channel) -> None:
        """Create the client. channel: closed by `shutdown`."""
        self.channel = channel
        self._num_calls = 0

    @property
    def facts(self) -> EngineFacts:
        """The engine's properties that a front end needs."""
        return self.channel.facts

    @property
    def error(self) -> DovetailError | None:
        """The error that stopped the engine, or None."""
        return self.channel.error

    @property
    def state(self) -> EngineState:
        """The state of the engine. Send requests only to an engine that is `READY`."""
        return self.channel.state

    @property
    def paused(self) -> PauseScope | None:
        """The scope of the engine's pause, as of the last message, or None without a pause."""
        return self.channel.paused

    @property
    def progress(self) -> Progress:
        """The engine's progress, as of the last message."""
        return self.channel.progress

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the engine."""
        return self.channel.num_restarts

    @property
    def process_id(self) -> int:
        """The id of the process that the engine runs in."""
        return self.channel.process_id

    @property
    def address(self) -> str | None:
        """The address to which other processes attach, or None for an in-process engine."""
        return self.channel.address

    @property
    def core(self) -> EngineCore:
        """The engine core in this process, for tests and measurements."""
        if isinstance(self.channel, InprocChannel):
            return self.channel.core
        raise AttributeError("core is not available: the engine core runs in another process.")

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until an engine is ready. Return False after the timeout.

        Raises EngineDeadError if it failed.
        """
        return self.channel.wait_until_ready(timeout_s)

    def _make_call(self, operation: Operation[..., Any], arguments: tuple[Any, ...]) -> Call:
        if not operation.expects_response:
            return Call(0, operation, arguments)
        self._num_calls += 1
        return Call(self._num_calls, operation, arguments)


class EngineClient(BaseClient):
    """A synchronous client: calls the operations of an engine from one thread."""

    def __init__(self, channel: Channel) -> None:
        """Create the client. channel: closed by `shutdown`."""
        super().__init__(channel)
        self._outputs: deque[EngineCoreOutputs] = deque()

    def call(self, operation: Operation[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call an operation and return its result. Keep outputs that arrive before the result."""
        call = self._make_call(operation, arguments)
        self.channel.send(call)
        while call.number:
            message = self.channel.receive()
            if isinstance(message, Reply):
                if message.number == call.number:
                    return message.result()
            elif message is not None:
                self._take(message)
        return None

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests immediately. The engine sends no further outputs for them.

        Does nothing if the engine has failed.
        """
        aborted = frozenset(request_ids)
        if not aborted or self.error is not None:
            return
        with suppress(EngineDeadError, UnavailableError):  # the next call raises the error
            self.call(EnginePort.abort_requests, (tuple(aborted),))
        self._outputs = deque(without(output, aborted) for output in self._outputs)

    def get_outputs(self, timeout_s: float | None = None) -> EngineCoreOutputs | None:
        """Return the outputs of a step, or None if none arrived within `timeout_s` seconds.

        timeout_s: None for no limit; then the call waits until outputs arrive or the engine fails.
        An in-process engine runs a step instead of waiting, and returns None if there is nothing to
        do, or if no result is due yet.
        """
        if self._outputs:
            return self._outputs.popleft()
        message = self.channel.receive(timeout_s)
        while isinstance(message, Reply):  # the reply to an interrupted call
            message = self.channel.receive(timeout_s)
        if message is not None:
            self.channel.acknowledge()
        return message

    def shutdown(self) -> None:
        """Shut down the engine, or detach this client from it. May be called twice."""
        self.channel.close()

    def _take(self, outputs: EngineCoreOutputs) -> None:
        self.channel.acknowledge()
        self._outputs.append(outputs)


class AsyncEngineClient(BaseClient):
    """An asynchronous client for the event loop that runs when a method is first awaited.

    A thread receives the engine's messages and passes them to the loop, so that decoding does not
    block the loop. The engine stops stepping while the loop does not take its outputs. When the
    engine fails, every caller that waits for outputs or a reply gets the error immediately. Outputs
    may still contain requests that were aborted: do not reuse request ids.
    """

    def __init__(self, channel: Channel) -> None:
        """Create the client. channel: closed by `shutdown`."""
        super().__init__(channel)
        self._error: DovetailError | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._came = asyncio.Event()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._thread: _OutputThread | None = None
        on_fork_in_child(self._disown)

    @property
    def error(self) -> DovetailError | None:
        """The error that stopped the engine. None until waiting callers have received it."""
        return self._error

    async def call(self, operation: Operation[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call an operation and return its result."""
        self._check_alive()
        call = self._make_call(operation, arguments)
        if not call.number:
            self.channel.send(call)
            return None
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[call.number] = future
        try:
            self.channel.send(call)
            return (await future).result()
        finally:
            del self._replies[call.number]

    async def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests without waiting for the engine. Do nothing if the engine has failed."""
        if self._error is not None:
            return
        self._check_alive()
        # Callers that wait for outputs are notified of the engine's failure.
        with suppress(EngineDeadError, UnavailableError):
            self.channel.send(Call(0, EnginePort.abort_requests, (tuple(request_ids),)))

    async def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the next outputs and return them. Raise the engine's error if it fails."""
        while not self._outputs:
            self._check_alive()
            self._came.clear()
            await self._came.wait()
        return self._take_first()

    def get_queued_outputs(self) -> EngineCoreOutputs | None:
        """Return the next outputs if they have arrived, else None. Never waits."""
        return self._take_first() if self._outputs else None

    async def check_alive(self) -> None:
        """Raise the error that stopped the engine, even if no call has been made since.

        Raises UnavailableError while a supervised engine is being restarted.
        """
        self._check_alive()
        while (state := self.state) is EngineState.DEAD and self._error is None:
            await asyncio.sleep(_SHORT_NAP_S)  # the reading thread is about to receive the error
        if self._error is not None:
            raise self._error
        if state is EngineState.RESTARTING:
            raise UnavailableError("the engine failed and is being restarted.")

    def shutdown(self) -> None:
        """Shut down the engine, or detach from it. Waiting callers get EngineDeadError.

        May be called from any thread, and twice.
        """
        thread = self._thread
        if thread is not None:
            thread.stop()
        self.channel.close()
        error = self._error or EngineDeadError("the engine was shut down; create a new one.")
        if thread is None or not thread.call_in_loop(self._fail, error):
            self._fail(error)

    def _check_alive(self) -> None:
        """Raise the engine's error if it has failed.

        Start the reading thread if it is not running.
        """
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._thread = _OutputThread(self, asyncio.get_running_loop())
            finalize_in_owner(self, self._thread.stop)

    def _disown(self) -> None:
        """Make every later call raise an error. Runs in a forked child."""
        self._error = self.channel.error

    def _take_first(self) -> EngineCoreOutputs:
        self.channel.acknowledge()
        return self._outputs.popleft()

    def _take(self, message: Received) -> None:
        if not isinstance(message, Reply):
            self._came.set()
            return
        future = self._replies.get(message.number)
        if future is not None and not future.done():
            future.set_result(message)

    def _fail(self, error: DovetailError) -> None:
        self._error = error
        self._came.set()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)


class _OutputThread:
    """Receives an engine's messages and passes them to the client, in the event loop.

    Refers to the client only weakly, so that an unused client is collected.
    """

    def __init__(self, client: AsyncEngineClient, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread."""
        self._client = weakref.ref(client)
        self._channel = client.channel
        self._loop = loop
        self._wanted = True
        self._thread = threading.Thread(target=self._read, name="engine-outputs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it to exit. May be called twice, and in this thread."""
        self._wanted = False
        if self._thread is not threading.current_thread():
            self._thread.join()

    def call_in_loop(self, call: Callable[..., None], *arguments: object) -> bool:
        """Run a call in the event loop, immediately if this is the loop's thread.

        Returns False if the loop is closed.
        """
        try:
            if asyncio._get_running_loop() is self._loop:
                call(*arguments)
            else:
                self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return False
        return True

    def _read(self) -> None:
        """Pass messages to the client until the engine fails or the client is collected."""
        while self._wanted:
            try:
                message = self._channel.receive(_NAP_S)
            except DovetailError as error:
                self._pass_on(AsyncEngineClient._fail, error)
                return
            if message is None:
                continue
            client = self._client()
            if client is not None and not isinstance(message, Reply):
                client._outputs.append(message)
            del client
            self._pass_on(AsyncEngineClient._take, message)

    def _pass_on(self, method: Callable[..., None], argument: object) -> None:
        client = self._client()
        # If the client was collected, or its loop closed, no caller waits.
        if client is None or not self.call_in_loop(method, client, argument):
            self._wanted = False


def without(outputs: EngineCoreOutputs, request_ids: Collection[str]) -> EngineCoreOutputs:
    """Return the outputs without the outputs of `request_ids`."""
    names: list[str] = []
    counts, tokens = array("i"), array("i")
    end = 0
    for name, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
        start, end = end, end + count
        if name not in request_ids:
            names.append(name)
            counts.append(count)
            tokens.extend(outputs.token_ids[start:end])
    return replace(
        outputs,
        request_ids=names,
        num_new_tokens=counts,
        token_ids=tokens,
        finished=tuple(item for item in outputs.finished if item.request_id not in request_ids),
        logprobs=_others(outputs.logprobs, request_ids),
        prompt_logprobs=_others(outputs.prompt_logprobs, request_ids),
        num_cached_tokens=_others(outputs.num_cached_tokens, request_ids),
        admitted_ns=_others(outputs.admitted_ns, request_ids),
    )


def _others(by_request: Mapping[str, V], request_ids: Collection[str]) -> dict[str, V]:
    return {name: value for name, value in by_request.items() if name not in request_ids}
