"""What a front end has in hand: one contract, whether the engine core is here or in a process.

Requests and columns only: neither text nor tokenizer. The same calls give the same outputs through
every client. Knows no process: the client of one is in `sync_client`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from dovetail.clock import sleep
from dovetail.config import EngineConfig, RequestedConfig
from dovetail.engine.core import EngineCore
from dovetail.engine.process.engine_process import Progress
from dovetail.engine.start import StartedEngine, start_engine
from dovetail.errors import DovetailError, EngineDeadError, RequestError, UserError
from dovetail.executors.operation import check_callable_from_outside
from dovetail.interfaces import EngineCoreOutputs, ModelInfo, PauseScope
from dovetail.plugins import PluginRegistry
from dovetail.processes.ownership import forked_error, on_fork_in_child
from dovetail.request import EngineCoreRequest
from dovetail.transport.messages import Ready
from dovetail.value_checks import shorten

PAUSED_WAIT_S = 0.01
"""How long an engine in process waits when it is asked for outputs while a pause holds all."""

Operation = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a front end has to know of the engine that was started.

    config: resolved. max_model_len: tokens of a request, prompt and output; what the cache holds.
    """

    config: EngineConfig
    model_info: ModelInfo
    max_model_len: int

    @classmethod
    def of(cls, told: Ready) -> EngineFacts:
        """Return what a process has told."""
        return cls(
            config=EngineConfig.model_validate_json(told.config),
            model_info=told.model_info,
            max_model_len=told.max_model_len,
        )


class EngineClient(ABC):
    """An engine core to be called from one thread.

    Every method but `abort_requests` and `shutdown` raises EngineDeadError once the engine cannot
    go on.
    facts: of the engine. paused: how far it is, or None.
    """

    facts: EngineFacts
    paused: PauseScope | None = None

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over; do not wait for what the engine says of it.

        Raises RequestError if it is refused at once. What only another process can tell comes with
        the outputs: a `Finished` with the reason ERROR and the refusal as its message.
        """

    @abstractmethod
    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Hand requests over, before anything more runs; return the refusals by id."""

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once: nothing more is heard of them. Unknown ids are ignored."""

    @abstractmethod
    def get_outputs(self, timeout_s: float | None = None) -> EngineCoreOutputs | None:
        """Return what a step gave, or None if nothing came within `timeout_s` seconds.

        None waits as long as the engine lives. An engine in process runs a step instead of waiting,
        and returns None if there is nothing to do, or if no result is due yet. While all its
        requests wait for something, it waits some milliseconds, `timeout_s` at most, before a step.
        """

    @abstractmethod
    def pause(self, scope: PauseScope) -> None:
        """Hold requests as `EngineCore.pause` does."""

    @abstractmethod
    def resume(self) -> None:
        """Lift a pause; do nothing if there is none."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False if requests are under way."""

    @abstractmethod
    def call_workers(
        self,
        operation: Operation,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name; return the answers by rank.

        In process also a callable, which is given the worker. Over a process arguments and answers
        are plain data: a dataclass comes back as a dict. Raises UserError for what cannot be called
        from here, DovetailError for what the call raised there.
        """

    @property
    def error(self) -> DovetailError | None:
        """What the engine died of, or None while that is not known."""
        return None

    @property
    @abstractmethod
    def progress(self) -> Progress:
        """How far the engine has come, as of what was heard of it."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine. May be called twice."""


class InprocClient(EngineClient):
    """The engine core in this process and this thread. core: itself, for tests and measurements."""

    def __init__(self, config: RequestedConfig, *, plugins: PluginRegistry | None = None) -> None:
        """Start the engine; raise a DovetailError that names the part at fault.

        plugins: None for a registry of its own.
        """
        started: StartedEngine = start_engine(config, plugins=plugins)
        self.facts = EngineFacts(
            config=started.config,
            model_info=started.model_info,
            max_model_len=started.max_model_len,
        )
        self.core = started.core
        self._ahead = started.config.scheduler.async_scheduling
        self._num_steps = 0
        self._owner_pid = os.getpid()
        on_fork_in_child(self._disown)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request in; every refusal is raised at once."""
        self.core.check_health()
        self.core.add_request(request)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Take requests in."""
        self.core.check_health()
        refused = {}
        for request in requests:
            try:
                self.core.add_request(request)
            except RequestError as error:
                refused[request.request_id] = error
        return refused

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests."""
        self.core.abort_requests(request_ids)

    def get_outputs(self, timeout_s: float | None = None) -> EngineCoreOutputs | None:
        """Run a step, if there is anything to do; wait a moment while all requests only wait."""
        if not self.core.step_is_due():
            self.core.check_health()
            if timeout_s:
                sleep(min(timeout_s, PAUSED_WAIT_S))
            return None
        if (wait_s := self.core.wait_s) > 0:
            sleep(wait_s if timeout_s is None else min(wait_s, timeout_s))
            if self.core.wait_s > 0:
                return None
        self._num_steps += 1
        return self.core.step_with_batch_queue() if self._ahead else self.core.step()

    def pause(self, scope: PauseScope) -> None:
        """Hold requests."""
        self.core.pause(scope)
        self.paused = scope

    def resume(self) -> None:
        """Lift a pause."""
        self.core.resume()
        self.paused = None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self.core.reset_prefix_cache()

    def call_workers(
        self,
        operation: Operation,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        if isinstance(operation, str):
            check_callable_from_outside(operation)
        elif not callable(operation):
            raise UserError(
                f"operation={shorten(operation)} must be the name of a worker's method, or a "
                "callable that is given the worker."
            )
        answers: list[Any] = self.core.executor.collective_rpc(operation, args=args, kwargs=kwargs)
        return answers

    @property
    def progress(self) -> Progress:
        """The steps that were run; it is always heard of."""
        return Progress(num_steps=self._num_steps)

    def shutdown(self) -> None:
        """End the engine; do nothing in a forked child of the process that started it."""
        if os.getpid() == self._owner_pid:
            self.core.shutdown()

    def _disown(self) -> None:
        """In a forked child: let every call fail; the device's threads are the parent's alone."""
        self.core = cast("EngineCore", _ForkedCore(forked_error("this engine", self._owner_pid)))


class _ForkedCore:
    """Stands for an engine core that belongs to another process: every use raises `error`."""

    def __init__(self, error: EngineDeadError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error
