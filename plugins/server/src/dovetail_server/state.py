"""The objects that all routes of a server use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from dovetail.clock import Clock, MonotonicClock
from dovetail.engine.async_llm import AsyncLLM
from dovetail_server.lifecycle.admission import Admission
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.observers import Observers
from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The objects that routes use. slot: the engine. clock: the clock of the engine."""

    settings: ServerSettings
    slot: EngineSlot
    admission: Admission
    observers: Observers = field(default_factory=Observers)
    clock: Clock = field(default_factory=MonotonicClock)

    def admit(self, llm: AsyncLLM) -> AbstractContextManager[None]:
        """Count a request while it is served; raise APIError if the queue is full."""
        return self.admission.enter(self._most_unfinished(llm))

    def check_size(self, llm: AsyncLLM, num_completions: int, param: str) -> None:
        """Raise APIError if a request has more completions than the server accepts at a time."""
        most = self._most_unfinished(llm)
        if num_completions > most:
            raise APIError(
                f"The request asks for {num_completions} completions; this server accepts at most "
                f"{most} at a time (--max-num-seqs and --max-waiting).",
                param=param,
            )

    def _most_unfinished(self, llm: AsyncLLM) -> int:
        """Return the share of this API process in the requests of the server."""
        total = self.settings.max_waiting + llm.config.scheduler.max_num_seqs
        return -(-total // self.settings.api_processes)
