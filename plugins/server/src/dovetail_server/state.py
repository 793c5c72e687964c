"""The objects that all routes of a server use."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dovetail.clock import Clock, MonotonicClock
from dovetail.engine.async_llm import AsyncLLM
from dovetail_server.lifecycle.admission import Admission
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.observers import Observers
from dovetail_server.protocol.errors import APIError, unavailable
from dovetail_server.settings import ServerSettings

if TYPE_CHECKING:
    from dovetail_server.transport.exchange import Exchange


class OtherProcesses(Protocol):
    """The other API processes of the server."""

    async def num_running(self) -> int:
        """Return how many requests the other processes serve."""

    async def abort(self, ids: Collection[str], everything: bool) -> int:
        """Abort requests by the ids of their responses, or all. Return how many."""


class NoOthers:
    """The value of `OtherProcesses` for a server with one process."""

    async def num_running(self) -> int:
        """Return 0."""
        return 0

    async def abort(self, ids: Collection[str], everything: bool) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The objects that routes use.

    slot: the engine. clock: the clock of the engine. others: the other API processes. exchanges:
    the requests of this process that are being served, of all listeners.
    """

    settings: ServerSettings
    slot: EngineSlot
    admission: Admission
    observers: Observers = field(default_factory=Observers)
    clock: Clock = field(default_factory=MonotonicClock)
    others: OtherProcesses = field(default_factory=NoOthers)
    exchanges: set[Exchange] = field(default_factory=set)

    def admit(self, llm: AsyncLLM) -> AbstractContextManager[None]:
        """Count a request within the context. Raise APIError if the queue is full."""
        return self.admission.enter(self._max_unfinished(llm))

    def check_size(self, llm: AsyncLLM, num_completions: int, param: str) -> None:
        """Raise APIError if a request has more completions than the server accepts at a time."""
        maximum = self._max_unfinished(llm)
        if num_completions > maximum:
            raise APIError(
                f"The request needs {num_completions} completions; this server accepts at most "
                f"{maximum} at a time (--max-num-seqs and --max-waiting).",
                param=param,
            )

    def abort(self, ids: Collection[str], everything: bool) -> int:
        """Abort this process's requests by the ids of their responses, or all. Return how many."""
        requested, error = set(ids), unavailable("The request was aborted by the operator.")
        error.code, error.retry_after_s = "aborted", None
        num_aborted = 0
        for exchange in list(self.exchanges):
            if exchange.response_id and (
                everything or {exchange.request_id, exchange.response_id} & requested
            ):
                exchange.interrupt(error)
                num_aborted += 1
        return num_aborted

    def _max_unfinished(self, llm: AsyncLLM) -> int:
        """Return this API process's share of the number of requests that the server accepts."""
        total = self.settings.max_waiting + llm.config.scheduler.max_num_seqs
        return -(-total // self.settings.api_processes)
