"""The channel: what carries the calls of one client to an engine, and brings back what it says.

Calls go in, replies and outputs come out, in order. `InprocChannel` has the engine in the caller's
thread, `dovetail.engine.process.ProcessChannel` speaks with a process, and
`dovetail.engine.supervision.SupervisedChannel` wraps another channel and replaces it when its
engine dies. Clients know nothing else of an engine, so that each works through every channel.
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
"""How long an engine in process waits for outputs while a pause holds all requests."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a front end has to know of the engine that was started.

    config: resolved. max_model_len: tokens of a request, prompt and output; what the cache holds.
    front_end: the number of this front end; 0 is the one that started the engine.
    """

    config: EngineConfig
    model_info: ModelInfo
    max_model_len: int
    front_end: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an engine has come.

    num_steps: steps done, num_refused: messages that could not be read, as of the last heartbeat.
    age_s: seconds since it, or the quietest of its workers, showed life; a long step is not
    silence.
    step_s: seconds that a step has been under way; 0.0 if none is.
    """

    num_steps: int = 0
    num_refused: int = 0
    age_s: float = 0.0
    step_s: float = 0.0


class EngineState(StrEnum):
    """How an engine is.

    READY: it lives and its steps go on. STALLED: it lives and shows no sign of it, or a step does
    not end; it may come back. RESTARTING: it died, and another one is being started. DEAD: it is
    not started again. An engine without supervision is READY or DEAD.
    """

    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation. number: of its reply, from 1; 0 for one that is not answered."""

    number: int
    operation: Operation[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to the call of this number. value: its result, unless there is an error."""

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
    """The way to one engine. `send` and `receive` may run in two threads; `close` in any.

    facts: of the engine.
    """

    facts: EngineFacts

    @abstractmethod
    def send(self, call: Call) -> None:
        """Begin a call. Raises what is known at once: EngineDeadError, RequestError, MessageError.

        A channel whose engine is in this thread performs the call now.
        """

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next reply or outputs, or None if nothing came within `timeout_s` seconds.

        None waits as long as the engine lives. Raises EngineDeadError, now and from then on, once
        the engine has died and everything before has been returned.
        """

    @abstractmethod
    def close(self) -> None:
        """End what this client owns: the engine, or its place at another's. May be called twice."""

    def acknowledge(self) -> None:
        """Note that the caller has taken outputs: the engine may send more of them."""
        return

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for an engine; return whether there is one. Raises EngineDeadError for none."""
        if self.error is not None:
            raise self.error
        return True

    @property
    def error(self) -> DovetailError | None:
        """What the engine died of, or None while that is not known."""
        return None

    @property
    def state(self) -> EngineState:
        """How the engine is, though nobody has called it. From any thread."""
        return EngineState.READY if self.error is None else EngineState.DEAD

    @property
    def paused(self) -> PauseScope | None:
        """How far the engine is paused, by whatever client, as of what was received."""
        return None

    @property
    def progress(self) -> Progress:
        """How far the engine has come, as of what was received."""
        return Progress()

    @property
    def num_restarts(self) -> int:
        """How many engines were started after the first."""
        return 0

    @property
    def process_id(self) -> int:
        """The id of the engine's process."""
        return os.getpid()

    @property
    def address(self) -> str | None:
        """Where other processes can attach to the engine; None if they cannot."""
        return None


class InprocChannel(Channel):
    """The engine core in this process and thread: asking for outputs runs a step. core: itself."""

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
        self._replies: deque[Reply] = deque()
        self._owner_pid = os.getpid()
        on_fork_in_child(self._disown)

    def send(self, call: Call) -> None:
        """Perform the call. What one raises that is not answered is raised at once."""
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

        While all requests only wait for something, wait some milliseconds before a step. Returns
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
        """End the engine; do nothing in a forked child of the process that started it."""
        if os.getpid() == self._owner_pid:
            self.core.shutdown()

    @property
    def paused(self) -> PauseScope | None:
        """How far the engine is paused."""
        return self.core.paused

    @property
    def progress(self) -> Progress:
        """The steps that were run."""
        return Progress(num_steps=self._num_steps)

    def _disown(self) -> None:
        """In a forked child: let every call fail; the device's threads are the parent's alone."""
        self.core = cast("EngineCore", _ForkedCore(forked_error("this engine", self._owner_pid)))


class _ForkedCore:
    """Stands for an engine core that belongs to another process: every use raises `error`."""

    def __init__(self, error: EngineDeadError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error
