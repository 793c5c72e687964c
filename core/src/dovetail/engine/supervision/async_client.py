"""`AsyncSupervisedClient`: the client for an event loop that outlives its engine.

The same calls as `AsyncMPClient`. When the engine dies, the requests under way end with an error
among the outputs, and another engine is started in a thread; until it is ready, calls raise
UnavailableError, and `get_outputs` waits. EngineDeadError comes when no more is started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from dovetail.clock import Clock
from dovetail.config import RequestedConfig
from dovetail.engine.input_processor import user_request_id
from dovetail.engine.process.async_client import AsyncMPClient
from dovetail.engine.process.client import Operation
from dovetail.engine.supervision.engine_status import EngineStatus
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.engine.supervision.supervisor import Supervisor
from dovetail.errors import DovetailError, EngineDeadError, RequestError, UnavailableError
from dovetail.interfaces import EngineCoreOutputs, PauseScope
from dovetail.request import EngineCoreRequest

T = TypeVar("T")


class AsyncSupervisedClient(EngineStatus[AsyncMPClient]):
    """One engine process after the other, for the event loop that first awaits a method.

    facts: of the first engine; the others are made from the same configuration. paused: how far
    the engine is; a new one is paused as the last was, before it is given requests.
    """

    paused: PauseScope | None = None

    def __init__(
        self,
        config: RequestedConfig,
        *,
        rules: SupervisionRules | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start the first engine, which blocks; raise the DovetailError that its start raised."""
        self._supervisor = Supervisor(
            lambda: AsyncMPClient(config), rules=rules or SupervisionRules(), clock=clock
        )
        self.facts = self._supervisor.client().facts
        self._changed = asyncio.Event()

    @property
    def process_id(self) -> int:
        """The id of the process of the engine that runs."""
        return self._supervisor.client().process.pid

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request. Raises RequestError also for one that engines have died with."""
        client = self._supervisor.client()
        self._supervisor.admit(user_request_id(request.request_id), request)
        try:
            await self._try(client, client.add_request(request))
        except DovetailError:
            self._supervisor.dismiss(request.request_id)
            raise

    async def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Send requests, to be taken in together; return the refusals by id."""
        client = self._supervisor.client()
        refused: dict[str, RequestError] = {}
        admitted = []
        for request in requests:
            try:
                self._supervisor.admit(user_request_id(request.request_id), request)
                admitted.append(request)
            except RequestError as error:
                refused[request.request_id] = error
            except UnavailableError as error:
                refused[request.request_id] = RequestError(str(error), parameter="prompt")
        refused |= await self._try(client, client.add_requests(admitted))
        for request_id in refused:
            self._supervisor.dismiss(request_id)
        return refused

    async def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Send word; of a dead engine no request is left."""
        gone = list(request_ids)
        try:
            await self._supervisor.client().abort_requests(gone)
        except (EngineDeadError, UnavailableError):
            return  # told to whoever waits for outputs
        for request_id in gone:
            self._supervisor.dismiss(request_id)

    async def get_outputs(self) -> EngineCoreOutputs:
        """Return the next outputs, or the end of what an engine died with; wait for them."""
        loop = asyncio.get_running_loop()
        self._supervisor.on_change = lambda: _tell(loop, self._changed)
        lost = self._supervisor.lost
        while True:
            self._changed.clear()
            if lost:
                return lost.popleft()
            try:
                client = self._supervisor.client()
            except UnavailableError:
                await self._changed.wait()
                continue
            try:
                outputs = await client.get_outputs()
            except EngineDeadError as error:
                self._supervisor.lose(client, error)
                continue
            self._supervisor.note(outputs)
            return outputs

    def get_queued_outputs(self) -> EngineCoreOutputs | None:
        """Return the next outputs if they are there already, else None; never waits."""
        if self._supervisor.lost:
            return None  # `get_outputs` returns them
        try:
            outputs = self._supervisor.client().get_queued_outputs()
        except (EngineDeadError, UnavailableError):
            return None
        if outputs is not None:
            self._supervisor.note(outputs)
        return outputs

    async def pause(self, scope: PauseScope) -> None:
        """Hold requests, of the engines that are started later, too."""
        client, before = self._supervisor.client(), self.paused
        self.paused = self._supervisor.paused = scope
        try:
            await self._try(client, client.pause(scope))
        except BaseException:
            self.paused = self._supervisor.paused = before
            raise

    async def resume(self) -> None:
        """Lift a pause."""
        client = self._supervisor.client()
        await self._try(client, client.resume())
        self.paused = self._supervisor.paused = None

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False if requests are under way."""
        client = self._supervisor.client()
        return await self._try(client, client.reset_prefix_cache())

    async def call_workers(
        self,
        operation: Operation,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name; return the answers, plain data, by rank."""
        client = self._supervisor.client()
        return await self._try(client, client.call_workers(operation, args, kwargs))

    def shutdown(self) -> None:
        """End the engine, and start no more; whoever waits gets EngineDeadError."""
        self._supervisor.shutdown()
        self._changed.set()

    async def _try(self, client: AsyncMPClient, call: Awaitable[T]) -> T:
        """Await a call; if the engine dies in it, start another one and say so."""
        try:
            return await call
        except EngineDeadError as error:
            self._supervisor.lose(client, error)
            raise UnavailableError(
                f"the engine died during the call and is started again: {error}"
            ) from error


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)
