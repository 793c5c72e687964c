"""`SupervisedClient`: the engine client that outlives its engine.

The same calls as every `EngineClient`, from one thread. When the engine dies, the requests under
way end with an error among the outputs, and another engine is started; until it is ready, calls
raise UnavailableError, and `get_outputs` waits. EngineDeadError comes when no more is started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dovetail.clock import Clock
from dovetail.config import EngineConfig
from dovetail.engine.process.client import EngineClient, Operation
from dovetail.engine.process.sync_client import SyncMPClient
from dovetail.engine.supervision.outlook import Outlook
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.engine.supervision.supervisor import Supervisor
from dovetail.errors import DovetailError, EngineDeadError, RequestError, UnavailableError
from dovetail.interfaces import EngineCoreOutputs, PauseScope
from dovetail.request import EngineCoreRequest

T = TypeVar("T")


class SupervisedClient(Outlook[SyncMPClient], EngineClient):
    """`EngineClient` of one engine process after the other. A new engine is not paused."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        rules: SupervisionRules | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start the first engine; raise the DovetailError that its start raised."""
        self._supervisor = Supervisor(
            lambda: SyncMPClient(config), rules=rules or SupervisionRules(), clock=clock
        )
        self.facts = self._supervisor.client().facts
        self._lost: deque[EngineCoreOutputs] = deque()

    @property
    def process_id(self) -> int:
        """The id of the process of the engine that runs."""
        return self._supervisor.client().process.pid

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for an engine; return whether there is one. Raises EngineDeadError for none."""
        return self._supervisor.wait(timeout_s)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request. Raises RequestError also for one that engines have died with."""
        client = self._supervisor.client()
        self._supervisor.admit(request.request_id)
        try:
            self._try(client, lambda: client.add_request(request))
        except DovetailError:
            self._supervisor.dismiss(request.request_id)
            raise

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Send requests, and wait for what the engine says of them."""
        client = self._supervisor.client()
        refused: dict[str, RequestError] = {}
        admitted = []
        for request in requests:
            try:
                self._supervisor.admit(request.request_id)
                admitted.append(request)
            except RequestError as error:
                refused[request.request_id] = error
        refused |= self._try(client, lambda: client.add_requests(admitted))
        for request_id in refused:
            self._supervisor.dismiss(request_id)
        return refused

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; of a dead engine none is left."""
        gone = list(request_ids)
        try:
            client = self._supervisor.client()
        except (EngineDeadError, UnavailableError):
            return
        client.abort_requests(gone)
        for request_id in gone:
            self._supervisor.dismiss(request_id)

    def get_outputs(self, timeout_s: float | None = None) -> EngineCoreOutputs | None:
        """Return the next outputs, or the end of what an engine died with.

        While an engine is started it waits like for outputs.
        """
        if self._lost:
            return self._lost.popleft()
        if not self._supervisor.wait(timeout_s):
            return None
        client = self._supervisor.client()
        try:
            outputs = client.get_outputs(timeout_s)
        except EngineDeadError as error:
            self.paused = None
            return self._supervisor.lose(client, error)
        if outputs is not None:
            self._supervisor.note(outputs)
        return outputs

    def pause(self, scope: PauseScope) -> None:
        """Hold requests of the engine that runs."""
        client = self._supervisor.client()
        self._try(client, lambda: client.pause(scope))
        self.paused = scope

    def resume(self) -> None:
        """Lift a pause."""
        client = self._supervisor.client()
        self._try(client, client.resume)
        self.paused = None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        client = self._supervisor.client()
        return self._try(client, client.reset_prefix_cache)

    def call_workers(
        self,
        operation: Operation,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        client = self._supervisor.client()
        return self._try(client, lambda: client.call_workers(operation, args, kwargs))

    def shutdown(self) -> None:
        """End the engine, and start no more."""
        self._supervisor.shutdown()

    def _try(self, client: SyncMPClient, call: Callable[[], T]) -> T:
        """Call an engine's client; if the engine dies, start another one and say so."""
        try:
            return call()
        except EngineDeadError as error:
            lost = self._supervisor.lose(client, error)
            if lost is not None and lost.finished:
                self._lost.append(lost)
            self.paused = None
            raise UnavailableError(
                f"the engine died during the call and is started again: {error}"
            ) from error
