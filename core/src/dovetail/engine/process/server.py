"""The engine core's loop: receive messages, run steps, send messages.

One thread does everything in turn, so the core needs no lock; ZMQ's own threads read and write
meanwhile. Messages are checked by the reader, by the operation's declaration and by the core. An
unreadable message is counted and an invalid request is rejected with a reason; neither stops the
engine. A failed step stops the engine with an error that contains a summary of the plan. If a front
end detaches or is killed, only its own requests are aborted. This module does not depend on how its
process is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import zmq

from dovetail.clock import Clock
from dovetail.engine.core import EngineCore
from dovetail.engine.operation import Operation, PackedRequest
from dovetail.engine.port import OPERATIONS, EnginePort
from dovetail.engine.process.front_ends import FrontEnds, FrontEndState
from dovetail.engine.process.outgoing import pack_outputs
from dovetail.engine.process.request_intake import RequestIntake
from dovetail.errors import EngineDeadError, MessageError, RequestError, describe_failure
from dovetail.faults import fault
from dovetail.interfaces import EngineCoreOutputs, Finished
from dovetail.processes.liveness import LivenessWriter
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.transport.messages import (
    Answer,
    Call,
    Detach,
    Failed,
    Heartbeat,
    Hello,
    Stop,
    Taken,
    ToEngine,
    engine_reader,
    pack,
)
from dovetail.transport.remote_error import RemoteError

_IDLE_LOOK_MS = 250
"""How often an idle engine checks whether its workers are alive."""

_TOO_FAR_BEHIND = (
    "the engine has aborted the requests of this front end: it reads too slowly, and its unread "
    "outputs exceed the limit."
)


class EngineServer:
    """Serves one core to its front ends. Owns neither sockets nor core."""

    def __init__(
        self,
        core: EngineCore,
        inbox: zmq.Socket[bytes],
        front_ends: FrontEnds,
        *,
        ahead: bool,
        heartbeat_s: float,
        clock: Clock,
        liveness: LivenessWriter,
    ) -> None:
        """Create the server. ahead: whether a step is planned while another one is executed."""
        self._liveness = liveness
        self._core = core
        self._inbox = inbox
        self._step: Callable[[], EngineCoreOutputs | None] = (
            core.step_with_batch_queue if ahead else core.step
        )
        self._heartbeat_ns = int(heartbeat_s * 1e9)
        self._idle_ms = min(self._heartbeat_ns // 1_000_000, _IDLE_LOOK_MS)
        self._next_beat_ns = 0
        self._clock = clock
        self._reader = engine_reader()
        self._front_ends = front_ends
        self._num_steps = 0
        self._stopping = False
        self._intake = RequestIntake(clock)

    def run(self) -> int:
        """Serve until a stop message. Return the exit status: 0, or 1 if the engine failed."""
        try:
            while not self._stopping:
                self._read_messages(self._wait_ms())
                if self._can_step() and not (self._core.wait_s or self._intake.holds_steps):
                    self._run_step()
                else:
                    self._core.check_health()
                    self._send_responses()
                self._send_due_heartbeats()
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                error = EngineDeadError(describe_failure(error))
            for front_end in self._front_ends:
                self._front_ends.send(front_end, pack(Failed(RemoteError.of(error))))
            return 1
        return 0

    def _can_step(self) -> bool:
        return self._core.step_is_due() and self._front_ends.may_step()

    def _wait_ms(self) -> int:
        """Return how long to wait for a message before the next step or check."""
        if not self._can_step():
            return self._idle_ms
        return min(self._idle_ms, ceil(1000 * self._core.wait_s))

    def _read_messages(self, wait_ms: int) -> None:
        """Process messages for one time slice. Wait up to `wait_ms` for the first one."""
        if not self._intake.is_waiting and not self._inbox.poll(wait_ms):
            return
        self._intake.begin_time_slice()
        self._intake.proceed()
        while not (self._stopping or self._intake.is_waiting or self._intake.is_over):
            try:
                name, *contents = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                fault("engine.receive")
                message = self._reader.read(contents[0] if len(contents) == 1 else b"")
                self._do(name, message)
            except MessageError:
                continue  # counted by the reader, reported with the heartbeat

    # --- messages -----------------------------------------------------------------------------

    def _do(self, name: bytes, message: ToEngine) -> None:
        """Process a message. Raise MessageError if its sender is not allowed to send it."""
        front_end = self._front_ends.find(name)
        if isinstance(message, Hello):
            if front_end is None and (new := self._front_ends.attach(name)) is not None:
                self._send_heartbeat(new)
            return
        if front_end is None or (isinstance(message, Stop) and not front_end.is_owner):
            raise self._reader.reject("the sender is not allowed to send this message")
        front_end.num_heartbeats = 0
        match message:
            case Call():
                self._begin_call(front_end, message)
            case Taken():
                front_end.window.taken(message.num_messages)
            case Detach():
                self._forget(front_end)
            case Stop():
                self._stopping = True

    def _begin_call(self, front_end: FrontEndState, call: Call) -> None:
        operation = OPERATIONS.get(call.operation)
        if operation is None:
            raise self._reader.reject(f"{call.operation!r:.80} is not an operation")
        try:
            arguments = operation.decode_arguments(call.arguments)
        except MessageError as error:
            raise self._reader.reject(str(error)) from None
        if operation.takes_requests:
            self._take_requests(front_end, call.number, operation, arguments[0])
        elif operation is EnginePort.abort_requests:
            self._answer(
                front_end, call.number, operation, partial(self._abort, front_end, arguments[0])
            )
        else:
            perform = partial(operation.perform, self._core, arguments)
            self._answer(front_end, call.number, operation, perform)

    def _answer(
        self,
        front_end: FrontEndState,
        number: int,
        operation: Operation[..., Any],
        perform: Callable[[], Any],
    ) -> None:
        """Perform a call and send its result or error. Raise the error if the engine failed."""
        before = self._core.paused, self._core.asleep
        try:
            fault("engine.answer")
            content = pack(Answer(number, operation.encode_result(perform())))
        except EngineDeadError:
            raise
        except Exception as error:
            content = pack(Answer(number, error=RemoteError.of(error)))
        if (self._core.paused, self._core.asleep) != before:
            for other in self._front_ends:
                self._send_heartbeat(other)
        if number:
            self._send(front_end, content)

    # --- requests -----------------------------------------------------------------------------

    def _take_requests(
        self,
        front_end: FrontEndState,
        number: int,
        operation: Operation[..., Any],
        packed: PackedRequest | tuple[PackedRequest, ...],
    ) -> None:
        """Register the requests of a call: one request, or several together."""
        is_single = operation is EnginePort.add_request
        requests: Any = (packed,) if is_single else packed
        done = self._report_rejected if is_single else partial(self._reply_to_requests, number)
        self._intake.begin_batch(
            requests,
            partial(self._add, front_end),
            partial(done, front_end),
            holds_steps=not is_single and not self._core.has_work(),
        )
        self._intake.proceed()

    def _add(self, front_end: FrontEndState, request: EngineCoreRequest) -> None:
        if self._front_ends.find(front_end.name) is not front_end:
            raise RequestError("The front end has disconnected.")
        own_id = request.request_id
        core_id = front_end.scope(own_id)
        if core_id != own_id:
            request = replace(request, request_id=core_id)
        self._core.add_request(request)
        front_end.live[core_id] = own_id
        front_end.wants_stats = True

    def _abort(self, front_end: FrontEndState, request_ids: tuple[str, ...]) -> None:
        core_ids = [front_end.scope(request_id) for request_id in request_ids]
        self._core.abort_requests(core_ids)
        for core_id in core_ids:
            front_end.live.pop(core_id, None)
        front_end.wants_stats = True

    def _report_rejected(self, front_end: FrontEndState, rejected: dict[str, RequestError]) -> None:
        """Send rejections as finished outputs, if the call does not wait for a response."""
        ends = [
            Finished(request_id=name, reason=FinishReason.ERROR, message=str(error))
            for name, error in rejected.items()
        ]
        if ends:
            self._send_ends(front_end, ends)

    def _reply_to_requests(
        self, number: int, front_end: FrontEndState, rejected: dict[str, RequestError]
    ) -> None:
        # Sent with the outputs of the first step: waking the front end earlier would take a
        # CPU core from the workers.
        result = EnginePort.add_requests.encode_result(rejected)
        if number:
            front_end.responses.append(Answer(number, result))

    # --- steps --------------------------------------------------------------------------------

    def _run_step(self) -> None:
        self._liveness.begin_step()
        fault("engine.step")
        outputs = self._step()
        self._liveness.end_step()
        self._num_steps += 1
        if outputs is None:
            return
        for front_end in self._front_ends.send_outputs(outputs):
            self._forget(front_end)

    def _limit(self, front_end: FrontEndState) -> None:
        """Abort the requests of a front end that reads too slowly, or detach it if it has none.

        The front end that started the engine is never detached.
        """
        if not front_end.live:
            if front_end.window.is_flooded and not front_end.is_owner:
                error = EngineDeadError("the engine has detached this front end: it does not read.")
                self._send(front_end, pack(Failed(RemoteError.of(error))))
                self._forget(front_end)
            return
        ends = [
            Finished(request_id=name, reason=FinishReason.ERROR, message=_TOO_FAR_BEHIND)
            for name in front_end.live.values()
        ]
        self._core.abort_requests(list(front_end.live))
        front_end.live.clear()
        self._send_ends(front_end, ends)

    def _send_ends(self, front_end: FrontEndState, ends: list[Finished]) -> None:
        for content in pack_outputs(EngineCoreOutputs(finished=tuple(ends))):
            self._send(front_end, content)

    def _send_responses(self) -> None:
        for front_end in self._front_ends:
            replies, front_end.responses = front_end.responses, []
            for reply in replies:
                self._send(front_end, pack(reply))

    def _send(self, front_end: FrontEndState, content: bytes) -> None:
        if not self._front_ends.send(front_end, content):
            self._forget(front_end)

    def _forget(self, front_end: FrontEndState) -> None:
        """Abort a disconnected front end's requests. Stop the engine if the front end owns it."""
        if front_end.is_owner:
            return
        self._front_ends.remove(front_end)
        self._core.abort_requests(list(front_end.live))
        front_end.live.clear()

    def _send_due_heartbeats(self) -> None:
        now_ns = self._clock.now_ns()
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + self._heartbeat_ns
            fault("engine.beat")
            for front_end in self._front_ends:
                if self._front_ends.is_heartbeat_due(front_end):
                    self._send_heartbeat(front_end)
                if front_end.is_too_slow():
                    self._limit(front_end)

    def _send_heartbeat(self, front_end: FrontEndState) -> None:
        core = self._core
        beat = Heartbeat(self._num_steps, self._reader.num_rejected, core.paused, core.asleep)
        if not self._front_ends.send(front_end, pack(beat), counts=False):
            self._forget(front_end)
