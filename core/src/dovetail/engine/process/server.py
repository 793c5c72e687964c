"""The engine core's loop: messages in, steps, messages out.

One thread does everything in turn, so that the core needs no lock; ZMQ's own threads read and
write meanwhile. What comes in is checked by its reader and once more by the core: a message that
is none is counted, a request that is wrong is refused by name, and neither ends anything. A step
that fails ends the engine, with its digest. Knows no process and no parent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import ceil
from typing import Any

import zmq

from dovetail.clock import Clock
from dovetail.engine.core import EngineCore
from dovetail.engine.process.outgoing import OutputWindow, pack_outputs
from dovetail.engine.process.request_intake import RequestIntake
from dovetail.errors import DovetailError, EngineDeadError, MessageError, RequestError
from dovetail.executors.operation import check_callable_from_outside
from dovetail.faults import fault
from dovetail.interfaces import EngineCoreOutputs, SchedulerStats
from dovetail.plugins.containment import describe_failure
from dovetail.processes.liveness import LivenessWriter
from dovetail.transport.messages import (
    Abort,
    Add,
    AddBatch,
    Answer,
    Call,
    Died,
    Heartbeat,
    Message,
    Pause,
    Question,
    Refused,
    ResetPrefixCache,
    Resume,
    Stop,
    Taken,
    ToEngine,
    engine_reader,
    pack,
)

_IDLE_LOOK_MS = 250
"""How often an engine that has nothing to do looks whether its workers live."""

_GAUGES = (
    "num_waiting",
    "num_running",
    "num_used_blocks",
    "num_aborted",
    "num_preemptions",
    "policy_failures",
)
"""Statistics that are told when they change, though nothing ran."""


class EngineServer:
    """Serves one core to one front end. Owns neither sockets nor core."""

    def __init__(
        self,
        core: EngineCore,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        *,
        ahead: bool,
        heartbeat_s: float,
        clock: Clock,
        liveness: LivenessWriter,
    ) -> None:
        """ahead: whether a plan is made while another one is executed."""
        self._liveness = liveness
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._step: Callable[[], EngineCoreOutputs | None] = (
            core.step_with_batch_queue if ahead else core.step
        )
        self._heartbeat_ns = int(heartbeat_s * 1e9)
        self._idle_ms = min(self._heartbeat_ns // 1_000_000, _IDLE_LOOK_MS)
        self._next_beat_ns = 0
        self._clock = clock
        self._reader = engine_reader()
        # To `AddBatch`. They wait for the outputs of the first step, since waking the front end
        # before it takes a core from the workers.
        self._answers: list[Answer] = []
        self._last_stats: SchedulerStats | None = None
        self._window = OutputWindow()
        self._num_steps = 0
        self._stopping = False
        self._intake = RequestIntake(core, clock)

    def run(self) -> int:
        """Serve until told to stop; return the process's exit status: 0, or 1 if it died."""
        try:
            while not self._stopping:
                self._take_in(self._wait_ms())
                if self._can_step() and not (self._core.wait_s or self._intake.holds_steps):
                    self._run_step()
                else:
                    self._core.check_health()
                    self._send_answers()
                self._beat()
        except EngineDeadError as error:
            self._send(Died(str(error).partition("\n")[0], error.digest))
            return 1
        except Exception as error:
            self._send(Died(describe_failure(error)))
            return 1
        return 0

    def _can_step(self) -> bool:
        return self._core.step_is_due() and not self._window.is_full

    def _wait_ms(self) -> int:
        """Return how long to wait for a message before the next step or look."""
        if not self._can_step():
            return self._idle_ms
        return min(self._idle_ms, ceil(1000 * self._core.wait_s))

    def _take_in(self, wait_ms: int) -> None:
        """Do what has come, as long as a turn lasts; wait `wait_ms` for the first message."""
        if not self._intake.is_waiting and not self._inbox.poll(wait_ms):
            return
        self._intake.begin_turn()
        self._go_on()
        while not (self._stopping or self._intake.is_waiting or self._intake.is_over):
            try:
                content = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                fault("engine.receive")
                message = self._reader.read(content)
            except MessageError:
                continue  # counted by the reader, told with the heartbeat
            self._do(message)

    def _do(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            refused = self._intake.add(message)
            if refused is not None:
                self._send(refused)
        elif isinstance(message, AddBatch):
            self._intake.add_batch(message)
            self._go_on()
        elif isinstance(message, Taken):
            self._window.taken(message.num_messages)
        elif isinstance(message, Stop):
            self._stopping = True
        else:
            self._answer(message)

    def _go_on(self) -> None:
        answer = self._intake.go_on()
        if isinstance(answer, Refused):
            self._send(answer)
        elif answer is not None:
            self._answers.append(answer)

    def _answer(self, message: Question) -> None:
        try:
            fault("engine.answer")
            content = pack(Answer(message.call, self._value(message)))
        except EngineDeadError:
            raise
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, DovetailError) else ""
            reason = str(error) if kind else describe_failure(error)
            content = pack(Answer(message.call, None, reason, kind or "DovetailError"))
        if message.call:
            self._outbox.send(content)

    def _value(self, message: Question) -> Any:
        match message:
            case Abort():
                return self._core.abort_requests(message.request_ids)
            case Pause():
                return self._core.pause(message.scope)
            case Resume():
                return self._core.resume()
            case ResetPrefixCache():
                return self._core.reset_prefix_cache()
            case Call():
                return self._call(message)

    def _call(self, message: Call) -> list[Any]:
        name = message.operation
        check_callable_from_outside(name)
        if ":" in name:  # in this process it would be anybody's function
            raise RequestError(f"operation {name!r} is not a worker's; only those can be called.")
        executor = self._core.executor
        answers: list[Any] = executor.collective_rpc(name, args=message.args, kwargs=message.kwargs)
        return answers

    def _run_step(self) -> None:
        self._liveness.begin_step()
        fault("engine.step")
        outputs = self._step()
        self._liveness.end_step()
        self._num_steps += 1
        if outputs is not None and (self._answers or self._has_news(outputs)):
            self._send_outputs(outputs)
            self._last_stats = outputs.stats

    def _has_news(self, outputs: EngineCoreOutputs) -> bool:
        """Return whether a front end learns anything from these outputs."""
        stats, last = outputs.stats, self._last_stats
        if outputs.request_ids or outputs.finished or stats is None or last is None:
            return True
        if stats.num_scheduled_tokens:
            return True
        return any(getattr(stats, name) != getattr(last, name) for name in _GAUGES)

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        for content in pack_outputs(outputs, tuple(self._answers)):
            self._send_packed(content)
            self._window.sent(len(content))
        self._answers.clear()

    def _send_answers(self) -> None:
        for answer in self._answers:
            self._send(answer)
        self._answers.clear()

    def _beat(self) -> None:
        now_ns = self._clock.now_ns()
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + self._heartbeat_ns
            fault("engine.beat")
            beat = pack(Heartbeat(self._num_steps, self._reader.num_refused))
            with suppress(zmq.Again):  # nobody reads: this one is of no use
                self._outbox.send(beat, zmq.NOBLOCK)

    def _send(self, message: Message) -> None:
        self._send_packed(pack(message))

    def _send_packed(self, content: bytes) -> None:
        # Waits while the front end's socket takes nothing in, which the window leaves to messages
        # without outputs. If the reader is gone, the parent's end ends this process.
        fault("engine.send")
        self._outbox.send(content)
