"""The clients of an engine: the port for a thread, and the port for an event loop.

Both are derived from the declarations in `dovetail.engine.port` and work through every channel.
Requests and columns only: neither text nor tokenizer. The same calls give the same outputs through
every client.
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
"""How long the reading thread may take to notice that it is no longer wanted."""


class BaseClient(EnginePort):
    """What both clients tell of their engine without asking it; from any thread."""

    def __init__(self, channel: Channel) -> None:
        """channel: is closed by `shutdown`."""
        self.channel = channel
        self._num_calls = 0

    @property
    def facts(self) -> EngineFacts:
        """What a front end has to know of the engine."""
        return self.channel.facts

    @property
    def error(self) -> DovetailError | None:
        """What the engine died of, or None while that is not known."""
        return self.channel.error

    @property
    def state(self) -> EngineState:
        """How the engine is; `READY` is what a load balancer asks for."""
        return self.channel.state

    @property
    def paused(self) -> PauseScope | None:
        """How far the engine is paused, by whatever client, as of what was heard of it."""
        return self.channel.paused

    @property
    def progress(self) -> Progress:
        """How far the engine has come, as of what was heard of it."""
        return self.channel.progress

    @property
    def num_restarts(self) -> int:
        """How many engines were started after the first."""
        return self.channel.num_restarts

    @property
    def process_id(self) -> int:
        """The id of the process that the engine runs in."""
        return self.channel.process_id

    @property
    def address(self) -> str | None:
        """Where other processes can attach to the engine; None for an engine in this process."""
        return self.channel.address

    @property
    def core(self) -> EngineCore:
        """The engine core in this process, for tests and measurements."""
        if isinstance(self.channel, InprocChannel):
            return self.channel.core
        raise AttributeError("This engine core is in another process.")

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for an engine; return whether there is one. Raises EngineDeadError for none."""
        return self.channel.wait_until_ready(timeout_s)

    def _make_call(self, operation: Operation[..., Any], arguments: tuple[Any, ...]) -> Call:
        if not operation.answered:
            return Call(0, operation, arguments)
        self._num_calls += 1
        return Call(self._num_calls, operation, arguments)


class EngineClient(BaseClient):
    """The engine port, called from one thread."""

    def __init__(self, channel: Channel) -> None:
        """channel: is closed by `shutdown`."""
        super().__init__(channel)
        self._outputs: deque[EngineCoreOutputs] = deque()

    def call(self, operation: Operation[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call an operation and return its result; outputs that come before it are kept."""
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
        """End requests at once: nothing of them comes afterwards; a dead engine has none left."""
        gone = frozenset(request_ids)
        if not gone or self.error is not None:
            return
        with suppress(EngineDeadError, UnavailableError):  # the next call raises it
            self.call(EnginePort.abort_requests, (tuple(gone),))
        self._outputs = deque(without(one, gone) for one in self._outputs)

    def get_outputs(self, timeout_s: float | None = None) -> EngineCoreOutputs | None:
        """Return what a step gave, or None if nothing came within `timeout_s` seconds.

        None waits as long as the engine lives. An engine in process runs a step instead of waiting,
        and returns None if there is nothing to do, or if no result is due yet.
        """
        if self._outputs:
            return self._outputs.popleft()
        message = self.channel.receive(timeout_s)
        while isinstance(message, Reply):  # to a call that was broken off
            message = self.channel.receive(timeout_s)
        if message is not None:
            self.channel.acknowledge()
        return message

    def shutdown(self) -> None:
        """End the engine, or this client's place at it. May be called twice."""
        self.channel.close()

    def _take(self, outputs: EngineCoreOutputs) -> None:
        self.channel.acknowledge()
        self._outputs.append(outputs)


class AsyncEngineClient(BaseClient):
    """The engine port for an event loop: the one that runs when a method is first awaited.

    A thread reads what the engine says and hands it to the loop, so that reading and checking bytes
    does not hold the loop up. The engine makes no more steps while the loop does not take what they
    gave. When the engine dies, whoever waits for outputs or a reply gets the error at once.
    Requests that were aborted may still be in outputs on their way: each needs an id of its own.
    """

    def __init__(self, channel: Channel) -> None:
        """channel: is closed by `shutdown`."""
        super().__init__(channel)
        self._error: DovetailError | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._came = asyncio.Event()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._thread: _OutputThread | None = None
        on_fork_in_child(self._disown)

    @property
    def error(self) -> DovetailError | None:
        """What the engine died of, once whoever waits has been told."""
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
        """Have requests ended, without waiting for it; a dead engine has none left."""
        if self._error is not None:
            return
        self._check_alive()
        # Whoever waits for outputs is notified of the engine's death.
        with suppress(EngineDeadError, UnavailableError):
            self.channel.send(Call(0, EnginePort.abort_requests, (tuple(request_ids),)))

    async def get_outputs(self) -> EngineCoreOutputs:
        """Return the next outputs; wait for them as long as the engine lives."""
        while not self._outputs:
            self._check_alive()
            self._came.clear()
            await self._came.wait()
        return self._take_first()

    def get_queued_outputs(self) -> EngineCoreOutputs | None:
        """Return the next outputs if they are there already, else None; never waits."""
        return self._take_first() if self._outputs else None

    async def check_alive(self) -> None:
        """Raise what the engine died of, though nobody has called it since.

        Raises UnavailableError while a supervised engine is being started again.
        """
        self._check_alive()
        while (state := self.state) is EngineState.DEAD and self._error is None:
            await asyncio.sleep(_SHORT_NAP_S)  # the reading thread is about to know it
        if self._error is not None:
            raise self._error
        if state is EngineState.RESTARTING:
            raise UnavailableError("the engine died and is being started again.")

    def shutdown(self) -> None:
        """End the engine, or this client's place at it; whoever waits gets EngineDeadError.

        May be called in any thread, and twice.
        """
        thread = self._thread
        if thread is not None:
            thread.stop()
        self.channel.close()
        error = self._error or EngineDeadError("the engine was shut down; make a new one.")
        if thread is None or not thread.call_in_loop(self._fail, error):
            self._fail(error)

    def _check_alive(self) -> None:
        """Raise the engine's error if it is dead; begin to read if nobody does yet."""
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._thread = _OutputThread(self, asyncio.get_running_loop())
            finalize_in_owner(self, self._thread.stop)

    def _disown(self) -> None:
        """In a forked child: let every call fail."""
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
    """Reads what an engine says and hands it to the client, in the event loop.

    Holds the client only weakly, so that one that is dropped ends.
    """

    def __init__(self, client: AsyncEngineClient, loop: asyncio.AbstractEventLoop) -> None:
        """Begin."""
        self._client = weakref.ref(client)
        self._channel = client.channel
        self._loop = loop
        self._wanted = True
        self._thread = threading.Thread(target=self._read, name="engine-outputs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for that; may be called in it, and twice."""
        self._wanted = False
        if self._thread is not threading.current_thread():
            self._thread.join()

    def call_in_loop(self, call: Callable[..., None], *arguments: object) -> bool:
        """Let the loop make a call; make it at once in the loop. Return False if it is closed."""
        try:
            if asyncio._get_running_loop() is self._loop:
                call(*arguments)
            else:
                self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return False
        return True

    def _read(self) -> None:
        """Hand on what the engine says, until it dies or nobody wants it."""
        while self._wanted:
            try:
                message = self._channel.receive(_NAP_S)
            except DovetailError as error:
                self._hand_over(AsyncEngineClient._fail, error)
                return
            if message is None:
                continue
            client = self._client()
            if client is not None and not isinstance(message, Reply):
                client._outputs.append(message)
            del client
            self._hand_over(AsyncEngineClient._take, message)

    def _hand_over(self, method: Callable[..., None], given: object) -> None:
        client = self._client()
        # Where the client is gone, or its loop closed, nobody waits any more.
        if client is None or not self.call_in_loop(method, client, given):
            self._wanted = False


def without(outputs: EngineCoreOutputs, request_ids: Collection[str]) -> EngineCoreOutputs:
    """Return the outputs without what they say of these requests."""
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
        finished=tuple(one for one in outputs.finished if one.request_id not in request_ids),
        logprobs=_others(outputs.logprobs, request_ids),
        prompt_logprobs=_others(outputs.prompt_logprobs, request_ids),
        num_cached_tokens=_others(outputs.num_cached_tokens, request_ids),
    )


def _others(told: Mapping[str, V], request_ids: Collection[str]) -> dict[str, V]:
    return {name: value for name, value in told.items() if name not in request_ids}
