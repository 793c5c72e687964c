"""The channel: sends one client's calls to an engine, and receives the replies and outputs.

Replies and outputs arrive in order. `InprocChannel` runs the engine in the caller's thread,
`dovetail.engine.process.ProcessChannel` connects to a process, and
`dovetail.engine.supervision.SupervisedChannel` wraps another channel and replaces it when its
engine fails. Clients use an engine only through a channel, so each client works with every channel.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, cast

from dovetail.clock import sleep
from dovetail.config import EngineConfig, RequestedConfig
from dovetail.engine.core import EngineCore
from dovetail.engine.operation import Operation
from dovetail.engine.start import StartedEngine, start_engine
from dovetail.errors import DovetailError, EngineDeadError
from dovetail.interfaces import EngineCoreOutputs, ModelInfo, PauseScope
from dovetail.plugins import PluginRegistry
from dovetail.processes.ownership import forked_error, on_fork_in_child

PAUSED_WAIT_S = 0.01
"""How long `receive` of an in-process engine waits while a pause holds all requests."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The properties of a started engine that a front end needs.

    config: the resolved configuration. max_model_len: maximum tokens of a request, prompt and
    output.
    front_end: the number of this front end; 0 is the front end that started the engine. phases: the
    startup phases: name, seconds, and growth of the engine process's memory in bytes.
    cache_bytes: size of the KV cache.
    """

    config: EngineConfig
    model_info: ModelInfo
    max_model_len: int
    front_end: int = 0
    phases: tuple[tuple[str, float, int], ...] = ()
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of an engine.

    num_steps, num_rejected: executed steps and unreadable messages, as of the last heartbeat.
    age_s: seconds since the last heartbeat of the engine, or of a worker if that is older;
    heartbeats continue during a long step. step_s: seconds since the current step began; 0.0
    between steps.
    """

    num_steps: int = 0
    num_rejected: int = 0
    age_s: float = 0.0
    step_s: float = 0.0


class EngineState(StrEnum):
    """The state of an engine.

    READY: it runs and completes its steps. STALLED: it runs but sends no heartbeat, or a step does
    not complete; it may recover. RESTARTING: it failed, and another engine is being started. DEAD:
    it is not restarted. An engine without supervision is READY or DEAD.
    """

    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation. number: identifies the reply, from 1, or 0 if there is no reply."""

    number: int
    operation: Operation[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to the engine call `number`. value: its result, unless there is an error."""

    number: int
    value: Any = None
    error: DovetailError | None = None

    def result(self) -> Any:
        """Return the result, or raise the error that the call raised."""
        if self.error is not None:
            raise self.error
        return self.value


Received = Reply | EngineCoreOutputs


class Channel(ABC):
    """The connection to one engine.

    `send` and `receive` may run in two threads, `close` in any thread. facts: sizes and settings of
    the engine, for front ends.
    """

    facts: EngineFacts

    @abstractmethod
    def send(self, call: Call) -> None:
        """Send a call.

        Raises EngineDeadError, RequestError or MessageError if the failure is known immediately.
        With an in-process engine the call is executed immediately.
        """

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next reply or outputs, or None if none arrived within `timeout_s` seconds.

        If `timeout_s` is None, wait until something arrives or the engine fails. After the
        last message of a failed engine, this and every later call raises EngineDeadError.
        """

    @abstractmethod
    def close(self) -> None:
        """Shut down the engine if this client owns it, else detach. May be called twice."""

    def acknowledge(self) -> None:
        """Record that the caller has taken outputs, so that the engine can send more."""
        return

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until an engine is ready. Return False after the timeout.

        Raises EngineDeadError if it failed.
        """
        if self.error is not None:
            raise self.error
        return True

    @property
    def error(self) -> DovetailError | None:
        """The error that stopped the engine, or None."""
        return None

    @property
    def state(self) -> EngineState:
        """The state of the engine. Makes no call to the engine. Any thread may read it."""
        return EngineState.READY if self.error is None else EngineState.DEAD

    @property
    def paused(self) -> PauseScope | None:
        """The scope of the engine's pause, as of the last message, or None without a pause."""
        return None

    @property
    def progress(self) -> Progress:
        """The engine's progress, as of the last message."""
        return Progress()

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the engine."""
        return 0

    @property
    def process_id(self) -> int:
        """The id of the engine's process."""
        return os.getpid()

    @property
    def address(self) -> str | None:
        """The address to which other processes attach, or None if they cannot attach."""
        return None


class InprocChannel(Channel):
    """An engine core in this process and thread: receiving outputs runs a step."""

    def __init__(self, config: RequestedConfig, *, plugins: PluginRegistry | None = None) -> None:
        """Start the engine. If a part fails, raise a DovetailError that names it.

        plugins: None to create a registry.
        """
        started: StartedEngine = start_engine(config, plugins=plugins)
        self.facts = EngineFacts(
            config=started.config,
            model_info=started.model_info,
            max_model_len=started.max_model_len,
            phases=started.phase_facts,
            cache_bytes=started.kv_cache.num_blocks * started.kv_cache.bytes_per_block,
        )
        self.core = started.core
        self._ahead = started.config.scheduler.async_scheduling
        self._num_steps = 0
        self._replies: deque[Reply] = deque()
        self._owner_pid = os.getpid()
        on_fork_in_child(self._disown)

    def send(self, call: Call) -> None:
        """Perform the call. An error of a call without a reply is raised immediately."""
        if not call.number:
            self.core.check_health()
            call.operation.perform(self.core, call.arguments)
            return
        try:
            reply = Reply(call.number, call.operation.perform(self.core, call.arguments))
        except DovetailError as error:
            reply = Reply(call.number, None, error)
        self._replies.append(reply)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return a reply, or run a step if there is anything to do.

        If all requests wait for external work, wait a few milliseconds before a step. Returns
        None if there is nothing to do, or if no result is due yet.
        """
        if self._replies:
            return self._replies.popleft()
        core = self.core
        if not core.step_is_due():
            core.check_health()
            if timeout_s:
                sleep(min(timeout_s, PAUSED_WAIT_S))
            return None
        if (wait_s := core.wait_s) > 0:
            sleep(wait_s if timeout_s is None else min(wait_s, timeout_s))
            if core.wait_s > 0:
                return None
        self._num_steps += 1
        return core.step_with_batch_queue() if self._ahead else core.step()

    def close(self) -> None:
        """Shut the engine down. Do nothing in a forked child of the process that started it."""
        if os.getpid() == self._owner_pid:
            self.core.shutdown()

    @property
    def paused(self) -> PauseScope | None:
        """The scope of the engine's pause."""
        return self.core.paused

    @property
    def progress(self) -> Progress:
        """The number of executed steps."""
        return Progress(num_steps=self._num_steps)

    def _disown(self) -> None:
        """Make every later call raise an error. Runs in a forked child."""
        self.core = cast("EngineCore", _ForkedCore(forked_error("this engine", self._owner_pid)))


class _ForkedCore:
    """Replaces an engine core that belongs to another process: every use raises `error`."""

    def __init__(self, error: EngineDeadError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error
