"""`SupervisedClient`: the engine client that outlives its engine.

The same calls as every `EngineClient`, from one thread. When the engine dies, the requests under
way end with an error among the outputs, and another engine is started; until it is ready, calls
raise UnavailableError, and `get_outputs` waits. EngineDeadError comes when no more is started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from dovetail.clock import Clock
from dovetail.config import RequestedConfig
from dovetail.engine.process.client import EngineClient, Operation
from dovetail.engine.process.sync_client import SyncMPClient
from dovetail.engine.supervision.engine_status import EngineStatus
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.engine.supervision.supervisor import Supervisor
from dovetail.errors import DovetailError, EngineDeadError, RequestError, UnavailableError
from dovetail.interfaces import EngineCoreOutputs, PauseScope
from dovetail.request import EngineCoreRequest

T = TypeVar("T")


class SupervisedClient(EngineStatus[SyncMPClient], EngineClient):
    """`EngineClient` of one engine process after the other. A new engine is paused as the last."""

    def __init__(
        self,
        config: RequestedConfig,
        *,
        rules: SupervisionRules | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start the first engine; raise the DovetailError that its start raised."""
        self._in_use = threading.Lock()
        self._supervisor = Supervisor(
            partial(_OwnedClient, config, self._in_use),
            rules=rules or SupervisionRules(),
            clock=clock,
        )
        self.facts = self._supervisor.client().facts

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
        self._supervisor.admit(request.request_id, request)
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
                self._supervisor.admit(request.request_id, request)
                admitted.append(request)
            except RequestError as error:
                refused[request.request_id] = error
            except UnavailableError as error:
                refused[request.request_id] = RequestError(str(error), parameter="prompt")
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
        with self._in_use:
            client.abort_requests(gone)
        for request_id in gone:
            self._supervisor.dismiss(request_id)

    def get_outputs(self, timeout_s: float | None = None) -> EngineCoreOutputs | None:
        """Return the next outputs, or the end of what an engine died with.

        While an engine is started it waits like for outputs.
        """
        lost = self._supervisor.lost
        while not lost:
            if not self._supervisor.wait(timeout_s):
                return None
            with suppress(UnavailableError):  # it has died meanwhile
                return self._get_outputs(self._supervisor.client(), timeout_s)
        return lost.popleft()

    def pause(self, scope: PauseScope) -> None:
        """Hold requests, of the engines that are started later, too."""
        client, before = self._supervisor.client(), self.paused
        self.paused = self._supervisor.paused = scope
        try:
            self._try(client, lambda: client.pause(scope))
        except BaseException:
            self.paused = self._supervisor.paused = before
            raise

    def resume(self) -> None:
        """Lift a pause."""
        client = self._supervisor.client()
        self._try(client, client.resume)
        self.paused = self._supervisor.paused = None

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

    def _get_outputs(
        self, client: SyncMPClient, timeout_s: float | None
    ) -> EngineCoreOutputs | None:
        """Return the next outputs of an engine; raise UnavailableError if it dies."""
        outputs = self._try(client, lambda: client.get_outputs(timeout_s))
        if outputs is not None:
            self._supervisor.note(outputs)
        return outputs

    def _try(self, client: SyncMPClient, call: Callable[[], T]) -> T:
        """Call an engine's client; if the engine dies, start another one and say so."""
        try:
            with self._in_use:
                return call()
        except EngineDeadError as error:
            self._supervisor.lose(client, error)
            raise UnavailableError(
                f"the engine died during the call and is started again: {error}"
            ) from error


class _OwnedClient(SyncMPClient):
    """A client that the supervisor's thread may ask for its end while nobody calls it."""

    def __init__(self, config: RequestedConfig, in_use: threading.Lock) -> None:
        super().__init__(config)
        self._in_use = in_use

    def find_end(self) -> DovetailError | None:
        """Return what the engine died of; None if it lives, or if who calls it will notice."""
        if not self._in_use.acquire(blocking=False):
            return None
        try:
            return super().find_end()
        finally:
            self._in_use.release()
