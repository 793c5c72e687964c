"""Where requests are handed in and their outputs fetched: the middle of `AsyncLLM`.

Joins a front end to the client of an engine in another process. One task reads what the engine
gives, in portions between which the event loop runs on; readers make their outputs themselves,
when they take them. Knows neither how an engine starts nor what else it can be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.engine.prompt_reading import read_prompt
from dovetail.engine.streaming.output_stream import OutputStream
from dovetail.engine.streaming.portions import cut_outputs
from dovetail.errors import (
    CapacityError,
    DovetailError,
    EngineDeadError,
    RequestError,
    UserError,
)
from dovetail.plugins.containment import describe_failure
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.clock import Clock
    from dovetail.engine.front_end import AskedRequest, FrontEnd
    from dovetail.engine.output_processor import CompletionGroup
    from dovetail.engine.process.async_client import AsyncMPClient
    from dovetail.engine.supervision.async_client import AsyncSupervisedClient
    from dovetail.inputs import Prompt
    from dovetail.interfaces import EngineCoreOutputs, SchedulerStats
    from dovetail.outputs import RequestOutput

LONG_TEXT_CHARS = 4096
"""Texts longer than this take some milliseconds to tokenise; a thread does it."""

MAX_TIMEOUT_S = 1e9

PORTION_WORK = 128
"""Tokens and log-probabilities that are processed between two looks at the clock."""

SLICE_NS = 4_000_000
"""How long outputs are processed before whoever else is ready in the loop has a turn."""


class RequestDesk:
    """The requests of one engine, for one event loop. last_stats: of the latest step, or None."""

    def __init__(
        self,
        front: FrontEnd,
        client: AsyncMPClient | AsyncSupervisedClient,
        *,
        max_asked: int,
        clock: Clock,
    ) -> None:
        """max_asked: completions that may be asked for at a time. Both parts stay the caller's."""
        self.last_stats: SchedulerStats | None = None
        self._front = front
        self._client = client
        self._clock = clock
        self._max_asked = max_asked
        self._num_asked = 0
        self._num_requests = 0
        self._arriving: set[str] = set()
        self._streams: dict[str, OutputStream] = {}
        self._error: DovetailError | None = None
        self._reader: asyncio.Task[None] | None = None
        self._chores: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Begin to read the engine's outputs, if nobody does yet.

        Raises the error that ended the desk, and UserError in another event loop.
        """
        if self._error is not None:
            raise copy(self._error)  # each caller's own, with its own traceback
        loop = asyncio.get_running_loop()
        if self._reader is None:
            self._reader = loop.create_task(self._read_outputs(), name="engine-outputs")
        elif self._reader.get_loop() is not loop:
            raise UserError("this AsyncLLM belongs to another event loop; make one for this loop.")

    async def serve(
        self, asked: AskedRequest, timeout_s: float | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request; see `AsyncLLM.generate`."""
        self.begin()
        _check_timeout(timeout_s)
        self._num_requests += 1
        serial = f"~{self._num_requests}"
        asked = replace(asked, request_id=asked.request_id or serial)
        request_id = asked.request_id
        num = asked.params.n if isinstance(asked.params, SamplingParams) else 1
        self._check_room(request_id, num)
        self._num_asked += num
        self._arriving.add(request_id)
        try:
            stream = await self._open(asked, serial, timeout_s)
            while not stream.ended:
                yield await stream.next()
        finally:
            self._num_asked -= num
            await self._forget(request_id)

    async def end(self, request_ids: Sequence[str], error: str | None = None) -> None:
        """End requests and tell their readers; unknown ids are ignored. error: why, for them."""
        self._arriving.difference_update(request_ids)
        await self._abort(self._settle(request_ids, error))

    def close(self, error: DovetailError) -> None:
        """Read no more, and let everybody who waits have `error`."""
        self._fail(error)
        for task in (self._reader, *self._chores):
            if task is not None:
                task.cancel()

    # --- one request --------------------------------------------------------------------------

    def _check_room(self, request_id: str, num: int) -> None:
        if not isinstance(request_id, str):
            raise RequestError(
                f"request_id must be a string, not {type(request_id).__name__}.",
                parameter="request_id",
            )
        if request_id in self._streams or request_id in self._arriving:
            raise RequestError(
                f"request_id={request_id!r} is in use by a request under way; choose another.",
                parameter="request_id",
            )
        if self._num_asked + num > self._max_asked:
            raise CapacityError(
                f"{num} more on top of {self._num_asked} completions that are asked for: this "
                f"engine takes {self._max_asked} at a time (max_num_seqs + max_waiting). Wait "
                "until some have been read to their end, or start it with a larger max_waiting."
            )

    async def _open(
        self, asked: AskedRequest, serial: str, timeout_s: float | None
    ) -> OutputStream:
        """Hand a request over to the engine; return where its outputs will be."""
        request_id = asked.request_id
        try:
            asked = replace(asked, prompt=await self._tokenized(asked.prompt))
            # The engine gets a name that never comes again: tokens of an aborted request, still
            # on their way, must not be taken for those of another one with the same id.
            requests, group = self._front.expect(asked, request_id + serial)
        except RequestError as error:
            self._front.listeners.request_failed(request_id, error)
            raise
        stream = self._streams[request_id] = OutputStream(group.output)
        if request_id not in self._arriving:  # aborted while it was tokenised
            self._front.outputs.end([request_id])
            stream.tell()
            return stream
        self._arriving.discard(request_id)
        self._set_timers(stream, group, timeout_s)
        for request in requests:
            await self._client.add_request(request)
        return stream

    async def _tokenized(self, prompt: Prompt) -> Prompt:
        """Return a long text with its tokens, made in a thread; any other prompt as it is."""
        content = read_prompt(prompt).content
        tokenizer = self._front.tokenizer
        if not isinstance(content, str) or len(content) <= LONG_TEXT_CHARS or tokenizer is None:
            return prompt
        token_ids = await asyncio.to_thread(tokenizer.encode, content)
        told: Any = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        both: Prompt = told | {"prompt_token_ids": token_ids}
        return both

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
            why = f"it was not done within timeout_s={timeout_s} s."
            stream.watch(loop.call_later(timeout_s, expire, why))
        if group.first.deadline_ns:
            left_s = (group.first.deadline_ns - self._clock.now_ns()) / 1e9
            why = "its first token was not there by its deadline_s."
            stream.watch(loop.call_later(left_s, expire_without_token, why))

    def _settle(self, request_ids: Sequence[str], error: str | None) -> list[str]:
        """End requests here and tell their readers; return what the engine must abort."""
        ended = self._front.outputs.end(request_ids, error)
        for group in ended.due:
            self._streams[group.request_id].tell()
        return ended.to_abort

    async def _forget(self, request_id: str) -> None:
        """Let nothing of a request remain: nobody reads it any more."""
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
        except DovetailError as error:  # raised here it would hide why a reader left
            self._fail(error)

    # --- all of them --------------------------------------------------------------------------

    async def _read_outputs(self) -> None:
        try:
            while True:
                await self._take_in(await self._client.get_outputs())
        except DovetailError as error:
            self._fail(error)
        except Exception as error:
            why = f"its outputs could not be read: {describe_failure(error)}; make a new engine."
            self._fail(EngineDeadError(why))
        finally:  # whoever cancels this task must not leave others waiting for ever
            why = "its event loop has ended, or cancelled all tasks: nobody reads its outputs now."
            self._fail(EngineDeadError(f"{why} Make a new engine, for one loop."))

    async def _take_in(self, outputs: EngineCoreOutputs) -> None:
        """Tell readers of one step's outputs; let others have a turn, at least once."""
        self.last_stats = outputs.stats or self.last_stats
        self._front.listeners.tell(outputs)
        start_ns = self._clock.now_ns()
        for portion in cut_outputs(outputs, PORTION_WORK):
            taken = self._front.outputs.take_in(portion)
            for group in taken.due:
                self._streams[group.request_id].tell()
            await self._abort(taken.to_abort)
            if self._clock.now_ns() - start_ns > SLICE_NS:
                await asyncio.sleep(0)
                start_ns = self._clock.now_ns()
        await asyncio.sleep(0)

    def _fail(self, error: DovetailError) -> None:
        """Let everybody have the first error, once what there is has been read."""
        self._error = self._error or error
        for stream in self._streams.values():
            stream.fail(self._error)


def _check_timeout(timeout_s: object) -> None:
    if timeout_s is None:
        return
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not (is_number and 0 < timeout_s <= MAX_TIMEOUT_S):  # type: ignore[operator]
        raise RequestError(
            f"timeout_s={timeout_s!r} must be a positive number of seconds, or None.",
            parameter="timeout_s",
        )
