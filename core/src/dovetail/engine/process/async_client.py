"""The engine in a process of its own, for an event loop: the same calls as coroutines.

A thread reads what the process says and hands it to the loop, so that reading and checking bytes
does not hold the loop up. The engine makes no more steps while the loop does not take what they
gave. When the engine dies, whoever waits for outputs or an answer gets the error at once.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dovetail.config import RequestedConfig
from dovetail.engine.process.client import EngineFacts, Operation
from dovetail.engine.process.engine_process import EngineProcess, Progress
from dovetail.engine.process.outgoing import Acknowledger
from dovetail.engine.process.sync_client import (
    answer_value,
    answers_of,
    batches,
    call_of,
    outputs_of,
    refusals_of,
)
from dovetail.errors import DovetailError, EngineDeadError, RequestError
from dovetail.interfaces import EngineCoreOutputs, PauseScope
from dovetail.processes.ownership import finalize_in_owner, on_fork_in_child
from dovetail.request import EngineCoreRequest
from dovetail.transport.messages import (
    Abort,
    Add,
    AddBatch,
    Answer,
    FromEngine,
    Outputs,
    Pause,
    Question,
    ResetPrefixCache,
    Resume,
)
from dovetail.transport.wire_types import wire_request

_SHORT_NAP_S = 0.005
_NAP_S = 0.2
"""How long the reading thread may take to notice that it is no longer wanted."""


class AsyncMPClient:
    """`EngineClient` for an event loop: the one that runs when a method is first awaited.

    facts, paused, error, progress: as of `EngineClient`; all may be read from any thread. Requests
    that were aborted may still be in outputs on their way, so that each needs an id of its own.
    """

    paused: PauseScope | None = None
    error: DovetailError | None = None

    def __init__(self, config: RequestedConfig) -> None:
        """Start the process, which blocks; raise the DovetailError that its start raised."""
        self.process = EngineProcess(config)
        self.facts = EngineFacts.of(self.process.ready)
        self._outputs: deque[tuple[EngineCoreOutputs, bool]] = deque()
        self._acknowledger = Acknowledger(self.process)
        self._came = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._num_calls = 0
        self._thread: _OutputThread | None = None
        self._reading = threading.Lock()
        on_fork_in_child(self._disown)

    @property
    def progress(self) -> Progress:
        """How far the engine has come."""
        return self.process.progress

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; its refusal, if any, comes with the outputs."""
        self._check_alive()
        self.process.send(Add(request.request_id, wire_request(request)))

    async def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Send requests, to be taken in together; return the refusals by id."""
        refused: dict[str, RequestError] = {}
        for batch in batches(requests, refused):
            refused |= refusals_of(await self._ask(AddBatch(self._next_call(), batch)))
        return refused

    async def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Send word; of a dead engine no request is left."""
        if self.error is None:
            self._check_alive()
            self.process.send(Abort(tuple(request_ids)))

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

    async def pause(self, scope: PauseScope) -> None:
        """Hold requests."""
        await self._ask(Pause(self._next_call(), scope))
        self.paused = scope

    async def resume(self) -> None:
        """Lift a pause."""
        await self._ask(Resume(self._next_call()))
        self.paused = None

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False if requests are under way."""
        return bool(await self._ask(ResetPrefixCache(self._next_call())))

    async def call_workers(
        self,
        operation: Operation,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name; return the answers, plain data, by rank."""
        answer: list[Any] = await self._ask(call_of(self._next_call(), operation, args, kwargs))
        return answer

    async def check_alive(self) -> None:
        """Raise what the engine died of, though nobody has called it since."""
        while self.error is None and self.process.has_ended():
            error = self.find_end()
            if error is not None:
                raise error
            await asyncio.sleep(_SHORT_NAP_S)  # the reading thread is about to know it
        if self.error is not None:
            raise self.error

    def find_end(self) -> DovetailError | None:
        """Return what the engine died of; None if it lives. In any thread."""
        if not self.process.has_ended():
            return None
        with self._reading:
            if self._thread is not None:
                return self._thread.error
            try:
                while self.process.receive(0) is not None:
                    pass  # nobody has asked for anything yet
            except DovetailError as error:
                return error
        return None

    def restore_pause(self, scope: PauseScope) -> None:
        """Pause a new engine, without waiting for its answer: what is sent later comes later."""
        self.process.send(Pause(0, scope))
        self.paused = scope

    def shutdown(self) -> None:
        """End the process; whoever waits gets EngineDeadError. In any thread, and twice, too."""
        thread = self._thread
        if thread is not None:
            thread.stop()
        self.process.close()
        error = self.error or EngineDeadError("the engine was shut down; make a new one.")
        if thread is None or not thread.call_in_loop(self._fail, error):
            self._fail(error)

    def _check_alive(self) -> None:
        """Raise the engine's error if it is dead; begin to read if nobody does yet."""
        if self.error is not None:
            raise self.error
        if self._thread is None:
            with self._reading:
                self._thread = _OutputThread(self, asyncio.get_running_loop())
            finalize_in_owner(self, self._thread.stop)

    def _disown(self) -> None:
        """In a forked child: let every call fail."""
        self.error = self.process.error

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    async def _ask(self, question: Question) -> Any:
        self._check_alive()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[question.call] = future
        try:
            self.process.send(question)
            return answer_value(await future)
        finally:
            del self._answers[question.call]

    def _take_first(self) -> EngineCoreOutputs:
        outputs, is_counted = self._outputs.popleft()
        if is_counted:
            self._acknowledger.took_one()
        return outputs

    def _receive(self, message: FromEngine) -> None:
        """In the thread: keep the outputs that a message brings, where the loop finds them."""
        if not isinstance(message, Answer):
            self._outputs.append((outputs_of(message), isinstance(message, Outputs)))

    def _take(self, answers: Iterable[Answer]) -> None:
        if self._outputs:
            self._came.set()
        for answer in answers:
            future = self._answers.get(answer.call)
            if future is not None and not future.done():
                future.set_result(answer)

    def _fail(self, error: DovetailError) -> None:
        self.error = error
        self._came.set()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)


class _OutputThread:
    """Reads what the process says and hands it to the client, in the event loop.

    Holds the client only weakly, so that one that is dropped ends. error: what the process died of,
    once it is known.
    """

    error: DovetailError | None = None

    def __init__(self, client: AsyncMPClient, loop: asyncio.AbstractEventLoop) -> None:
        """Begin."""
        self._client = weakref.ref(client)
        self._process = client.process
        self._loop = loop
        self._wanted = True
        self._thread = threading.Thread(target=self._read, name="engine-outputs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for that; may be called in it, and twice."""
        self._wanted = False
        if self._thread is not threading.current_thread():
            self._thread.join()

    def call_in_loop(self, call: Callable[..., None], *told: object) -> bool:
        """Let the loop make a call; make it at once in the loop. Return False if it is closed."""
        try:
            if asyncio._get_running_loop() is self._loop:
                call(*told)
            else:
                self._loop.call_soon_threadsafe(call, *told)
        except RuntimeError:
            return False
        return True

    def _read(self) -> None:
        """Hand on what the process says, until it dies or nobody wants it."""
        while self._wanted:
            try:
                message = self._process.receive(_NAP_S)
                if message is None:
                    continue
                client = self._client()
                if client is not None:
                    client._receive(message)
                del client
            except DovetailError as error:
                self.error = error
                self._hand_over("_fail", error)
                return
            self._hand_over("_take", answers_of(message))

    def _hand_over(self, method: str, *told: object) -> None:
        client = self._client()
        # Where the client is gone, or its loop closed, nobody waits any more.
        if client is None or not self.call_in_loop(getattr(client, method), *told):
            self._wanted = False
