"""Executes the executor's commands in the worker process, one by one, in one thread.

After a failed step the worker exits, because the state of the requests is unknown. After a failed
operation the error is sent as the response, and the next command follows. Rank 0 responds to steps
(with a KV connector every rank does), and every rank responds to calls. If the worker returns a
handle, its device is still computing: one more command is executed before the response is sent.
This module does not depend on how its process is started.
"""

from __future__ import annotations

from array import array
from contextlib import suppress

from dovetail.clock import sleep
from dovetail.errors import MessageError, PeerLostError
from dovetail.executors.operation import find_operation
from dovetail.faults import fault
from dovetail.interfaces.executor import Handle
from dovetail.interfaces.worker import WorkerBase
from dovetail.result import ModelRunnerOutput
from dovetail.transport.columns import frame_kind
from dovetail.transport.order_frame import (
    CALL,
    SAMPLE,
    CallResult,
    WorkerCall,
    decode_call,
    decode_sample,
    encode_call_result,
)
from dovetail.transport.plan_frame import PLAN, decode_plan
from dovetail.transport.remote_error import RemoteError
from dovetail.transport.result_frame import encode_result
from dovetail.transport.ring import RingReader, RingWriter

_PATIENCE_S = 86_400.0 * 365
"""Time limit for waiting until the response ring has room; in practice unlimited.

The executor reads responses only when it needs them, and this process exits with the executor."""

_PAUSE_S = 50e-6
"""Pause between two checks for a result or a command while the device computes. The pause delays a
step by at most this time, and leaves the CPU to other threads."""


def do_nothing(worker: WorkerBase) -> None:
    """Return immediately.

    The response to this operation shows that all commands before it are completed.
    """


class WorkerHost:
    """Executes the commands for one worker. Owns neither the worker nor the rings."""

    def __init__(
        self,
        worker: WorkerBase,
        rank: int,
        commands: RingReader,
        results_ring: RingWriter,
        *,
        reports_transfers: bool = False,
    ) -> None:
        """Create the host.

        reports_transfers: whether every rank responds to each step, with its KV connector's report.
        """
        self._reports_transfers = reports_transfers
        self._worker = worker
        self._rank = rank
        self._commands = commands
        self._responses = results_ring
        self._late: list[Handle[ModelRunnerOutput]] = []

    def serve(self) -> None:
        """Execute commands until the executor closes the ring. Raise the error of a failed step."""
        while True:
            try:
                command = self._receive()
            except PeerLostError:
                return
            self._do(command)

    def _receive(self) -> bytes:
        """Return the next command.

        Send the result of the last step as soon as its result is available.
        """
        while self._late:
            if self._late[0].done():
                self._respond_late()
                break
            with suppress(TimeoutError):
                return self._commands.receive(timeout_s=0)
            sleep(_PAUSE_S)
        return self._commands.receive()

    def _do(self, command: bytes) -> None:
        kind = frame_kind(command)
        if kind == PLAN:
            fault("worker.before_execute")
            self._worker.execute_model(decode_plan(command))
            self._respond_late()
        elif kind == SAMPLE:
            fault("worker.before_sample")
            output = self._worker.sample_tokens(decode_sample(command))
            if isinstance(output, ModelRunnerOutput):
                self._send_step_result(output)
            else:
                self._late.append(output)
        elif kind == CALL:
            self._respond_late()
            self._responses.send(self._answer(decode_call(command)), timeout_s=_PATIENCE_S)
        else:
            raise MessageError(f"A command has the unknown kind {kind}.")

    def _respond_late(self) -> None:
        """Wait for the results that are due, and send them. Raise the error of a failed step."""
        while self._late:
            self._send_step_result(self._late.pop().result())

    def _send_step_result(self, output: ModelRunnerOutput) -> None:
        if self._rank == 0:
            fault("worker.result")
            self._responses.send(encode_result(output), timeout_s=_PATIENCE_S)
        elif self._reports_transfers:
            report = ModelRunnerOutput(
                step_id=output.step_id,
                num_sampled=array("B"),
                token_ids=array("i"),
                kv_transfer=output.kv_transfer,
            )
            self._responses.send(encode_result(report), timeout_s=_PATIENCE_S)

    def _answer(self, call: WorkerCall) -> bytes:
        """Return the frame of a response. Only the requested ranks send the value."""
        try:
            fault("worker.call")
            operation = find_operation(self._worker, call.operation)
            value = operation(*call.args, **call.kwargs)
            is_requested = call.reply_rank in (None, self._rank)
            return encode_call_result(
                CallResult(number=call.number, value=value if is_requested else None)
            )
        except Exception as error:
            return encode_call_result(CallResult(number=call.number, error=RemoteError.of(error)))
