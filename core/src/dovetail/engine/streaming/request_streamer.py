"""Sends the requests of `AsyncLLM` to the engine, and streams their outputs.

Connects a front end with the client of an engine in another process. One task reads the engine's
outputs, in chunks between which other tasks of the event loop run; each reader creates its output
when it takes it. This module depends neither on the start of an engine nor on its other operations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.engine.output.output_chunks import cut_outputs
from dovetail.engine.streaming.event_loop_yield import EventLoopYield
from dovetail.engine.streaming.output_stream import OutputSink, OutputStream
from dovetail.engine.streaming.preparation import Preparers
from dovetail.errors import (
    CapacityError,
    DovetailError,
    EngineDeadError,
    RequestError,
    UserError,
)
from dovetail.plugins.containment import describe_failure
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import check_number, shorten

if TYPE_CHECKING:
    from dovetail.clock import Clock
    from dovetail.engine.client import AsyncEngineClient
    from dovetail.engine.front_end import CheckedRequest, FrontEnd, UserRequest
    from dovetail.engine.output.output_processor import CompletionGroup
    from dovetail.interfaces import EngineCoreOutputs, SchedulerStats
    from dovetail.outputs import RequestOutput
    from dovetail.request import EngineCoreRequest

logger = logging.getLogger(__name__)

MAX_TIMEOUT_S = 1e9

CHUNK_WORK = 128
"""Tokens and log-probabilities that are processed between two clock readings."""

SLICE_NS = 4_000_000
"""How long outputs are processed before other tasks of the event loop run."""


class RequestStreamer:
    """Streams requests in one event loop. last_stats: statistics of the latest step, or None."""

    def __init__(
        self,
        front: FrontEnd,
        client: AsyncEngineClient,
        *,
        max_requested: int,
        clock: Clock,
    ) -> None:
        """Create a streamer for `front` and `client`, which the caller owns.

        max_requested: maximum number of unfinished completions.
        """
        self.last_stats: SchedulerStats | None = None
        self._front = front
        self._client = client
        self._clock = clock
        self._max_requested = max_requested
        self._preparers = Preparers(front)
        self._event_loop = EventLoopYield(clock, SLICE_NS)
        self._num_requested = 0
        self._num_requests = 0
        self._arriving: set[str] = set()
        self._streams: dict[str, OutputStream] = {}
        self._error: DovetailError | None = None
        self._reader: asyncio.Task[None] | None = None
        self._chores: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Start the task that reads the engine's outputs, if it is not running.

        Raises the error that stopped the streamer, and UserError in another event loop.
        """
        if self._error is not None:
            raise copy(self._error)  # each caller gets a copy with its own traceback
        loop = _running_loop()
        if loop is None:
            raise UserError("AsyncLLM needs a running event loop; call this from a coroutine.")
        if self._reader is None:
            self._reader = loop.create_task(self._read_outputs(), name="engine-outputs")
        elif self._reader.get_loop() is not loop:
            raise UserError(
                "this AsyncLLM belongs to another event loop; create an AsyncLLM in this loop."
            )

    async def serve(
        self, user_request: UserRequest, timeout_s: float | None, sink: OutputSink | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request. See `AsyncLLM.generate`."""
        self.begin()
        timeout_s = _read_timeout(timeout_s)
        checked = self._check(user_request)
        request_id = checked.user_request.request_id
        params = checked.user_request.params
        num = params.n if isinstance(params, SamplingParams) else 1
        self._check_room(request_id, num)
        self._num_requested += num
        self._arriving.add(request_id)
        try:
            stream = await self._open(checked, timeout_s, sink)
            while not stream.ended:
                yield await stream.next()
        finally:
            self._num_requested -= num
            await self._forget(request_id)

    async def end(self, request_ids: Sequence[str], error: str | None = None) -> None:
        """Abort requests and notify their readers. Unknown ids are ignored. error: the cause."""
        self._arriving.difference_update(request_ids)
        await self._abort(self._settle(request_ids, error))

    def close(self, error: DovetailError) -> None:
        """Stop reading, and raise `error` in all waiting readers. May be called from any thread."""
        loop = None if self._reader is None else self._reader.get_loop()
        if loop is None or loop is _running_loop() or not loop.is_running():
            self._close(error)
        else:
            loop.call_soon_threadsafe(self._close, error)

    def _close(self, error: DovetailError) -> None:
        self._fail(error)
        self._preparers.close()
        for task in (self._reader, *self._chores):
            if task is not None:
                task.cancel()

    # --- one request --------------------------------------------------------------------------

    def _check(self, user_request: UserRequest) -> CheckedRequest:
        """Run the fast checks. Generate an unused id for a request without an id."""
        while isinstance(user_request.request_id, str) and not user_request.request_id:
            self._num_requests += 1
            if not self._in_use(f"~{self._num_requests}"):
                user_request = replace(user_request, request_id=f"~{self._num_requests}")
        try:
            return self._front.check(user_request)
        except RequestError as error:
            if isinstance(user_request.request_id, str):
                self._front.listeners.request_failed(user_request.request_id, error)
            raise

    def _in_use(self, request_id: str) -> bool:
        return request_id in self._streams or request_id in self._arriving

    def _check_room(self, request_id: str, num: int) -> None:
        if self._in_use(request_id):
            raise RequestError(
                f"request_id={shorten(request_id)} is in use by an unfinished request; choose "
                "another id.",
                parameter="request_id",
            )
        if self._num_requested + num > self._max_requested:
            raise CapacityError(
                f"The engine has {self._num_requested} completions and cannot accept {num} more: "
                f"at most {self._max_requested} are allowed at a time (max_num_seqs + "
                "max_waiting). Read all outputs of some requests, or start the engine with a "
                "larger max_waiting."
            )

    async def _open(
        self, checked: CheckedRequest, timeout_s: float | None, sink: OutputSink | None
    ) -> OutputStream:
        """Send a request to the engine. Return the stream of its outputs."""
        request_id = checked.user_request.request_id
        try:
            await self._event_loop.wait()
            prepared = await self._preparers.prepare(checked)
            self.begin()  # the engine may have failed meanwhile
            first, *others = self._front.complete(checked, prepared)
            if request_id in self._arriving:  # the request was not aborted meanwhile
                await self._client.add_request(first)
            # Nothing is awaited in between, so no output is read before the registration.
            group = self._front.register(checked, (first, *others))
        except RequestError as error:
            self._front.listeners.request_failed(request_id, error)
            raise
        stream = self._streams[request_id] = OutputStream(group.output, sink)
        if request_id not in self._arriving:
            self._front.outputs.end([request_id])
            stream.notify()
            return stream
        self._arriving.discard(request_id)
        self._set_timers(stream, group, timeout_s)
        await self._send(others, group)
        return stream

    async def _send(self, requests: Sequence[EngineCoreRequest], group: CompletionGroup) -> None:
        """Send the other requests of a group. Other tasks of the loop run in between."""
        for request in requests:
            await self._event_loop.wait()
            if not group.num_open:  # the group has ended, and its sent requests are aborted
                return
            await self._client.add_request(request)

    async def _pause_after(self, start_ns: int) -> int:
        """Let other tasks run if the time slice is over. Return the start of the current slice."""
        if self._clock.now_ns() - start_ns <= SLICE_NS:
            return start_ns
        await asyncio.sleep(0)
        return self._clock.now_ns()

    def _set_timers(
        self, stream: OutputStream, group: CompletionGroup, timeout_s: float | None
    ) -> None:
        loop = asyncio.get_running_loop()

        def expire(why: str) -> None:
            chore = loop.create_task(self._abort(self._settle([group.request_id], why)))
            self._chores.add(chore)
            chore.add_done_callback(self._chores.discard)

        def expire_without_token(why: str) -> None:
            if group.first_token_ns is None:
                expire(why)

        if timeout_s is not None:
            why = f"The request was not finished within timeout_s={timeout_s} s."
            stream.watch(loop.call_later(timeout_s, expire, why))
        if group.first.deadline_ns:
            left_s = (group.first.deadline_ns - self._clock.now_ns()) / 1e9
            why = "The request had no token by its deadline_s."
            stream.watch(loop.call_later(left_s, expire_without_token, why))

    def _settle(self, request_ids: Sequence[str], error: str | None) -> list[str]:
        """Abort requests and notify their readers. Return the ids that the engine must abort."""
        ended = self._front.outputs.end(request_ids, error)
        for group in ended.due:
            self._streams[group.request_id].notify()
        return ended.to_abort

    async def _forget(self, request_id: str) -> None:
        """Remove a request that has no reader any more."""
        self._arriving.discard(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.close()
            await self._abort(self._front.outputs.end([request_id]).to_abort)

    async def _abort(self, core_ids: list[str]) -> None:
        if not core_ids or self._error is not None:
            return
        try:
            await self._client.abort_requests(core_ids)
        except DovetailError as error:
            # Not raised, because it would hide why the reader left. If the engine has failed, the
            # task that reads its outputs reports it.
            logger.warning("Requests could not be aborted: %s", error)

    # --- all requests -------------------------------------------------------------------------

    async def _read_outputs(self) -> None:
        try:
            while True:
                await self._process_all(await self._client.get_outputs())
        except DovetailError as error:
            self._fail(error)
        except Exception as error:
            why = f"the engine's outputs could not be read: {describe_failure(error)}."
            self._fail(EngineDeadError(f"{why} Create a new engine."))
        finally:  # if this task is cancelled, readers must not wait forever
            why = "the event loop has ended or cancelled the task that reads the engine's outputs."
            self._fail(EngineDeadError(f"{why} Create a new engine, and use it in one loop."))

    async def _process_all(self, outputs: EngineCoreOutputs | None) -> None:
        """Notify the readers of these outputs and of all later ones that have arrived.

        Other tasks run after each `SLICE_NS`, and at the end. If the loop is slower than the
        engine, a reader gets the results of several steps in one output.
        """
        start_ns = self._clock.now_ns()
        while outputs is not None:
            self.last_stats = outputs.stats or self.last_stats
            self._front.listeners.notify(outputs)
            for chunk in cut_outputs(outputs, CHUNK_WORK):
                await self._process_outputs(chunk)
                start_ns = await self._pause_after(start_ns)
            outputs = self._client.get_queued_outputs()
        await asyncio.sleep(0)

    async def _process_outputs(self, chunk: EngineCoreOutputs) -> None:
        taken = self._front.outputs.process_chunk(chunk)
        for group in taken.due:
            stream = self._streams[group.request_id]
            if group.num_open:
                stream.offer()
            else:
                stream.notify()
        if taken.to_abort:
            await self._abort(taken.to_abort)

    def _fail(self, error: DovetailError) -> None:
        """Raise the first error in all readers, after the outputs that have arrived."""
        self._error = self._error or error
        for stream in self._streams.values():
            stream.fail(self._error)


def _read_timeout(timeout_s: object) -> float | None:
    if timeout_s is None:
        return None
    return check_number("timeout_s", timeout_s, 0.0, MAX_TIMEOUT_S, open_low=True)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
