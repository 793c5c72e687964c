"""The executor whose workers run in separate processes.

Commands are sent to all workers over one shared-memory ring, in the order of the calls. Rank 0
returns the results of steps, and every rank returns those of operations. A call returns when its
command is in the ring, so the engine plans the next step while this one is executed. If one worker
exits, all are killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from dovetail.clock import Clock, MonotonicClock
from dovetail.errors import (
    ConfigError,
    ContractError,
    EngineDeadError,
    StalledError,
    TransportError,
)
from dovetail.executors.multiproc.launch import launch
from dovetail.executors.multiproc.options import MultiprocOptions
from dovetail.executors.multiproc.responses import ResponseReader
from dovetail.executors.operation import check_rank
from dovetail.executors.worker_spec import check_plugins
from dovetail.faults import fault
from dovetail.interfaces.executor import Executor, ExecutorContext, Handle
from dovetail.interfaces.requested_config import MAX_WORKERS
from dovetail.interfaces.worker import GrammarOutput
from dovetail.plan import SchedulerOutput
from dovetail.processes.ownership import finalize_in_owner, forked_error, on_fork_in_child
from dovetail.processes.startup_phases import enter_phase
from dovetail.result import ModelRunnerOutput
from dovetail.transport.order_frame import WorkerCall, encode_call, encode_sample
from dovetail.transport.plan_frame import encode_plan
from dovetail.transport.ring import MAX_FRAME_BYTES

_ROOM_S = 0.05
_SHARE_OF_DEADLINE = 0.95
"""Share of the engine's timeout after which the executor reports a slow startup phase.

The executor's error names the worker; the engine's own timeout error does not.
"""
_FAILED_STOP_S = 1.0
"""How long workers may take to exit after a failed start."""
_OF_THE_START = ("init_device", "load_model")
_NOTHING = "dovetail.executors.multiproc.host:do_nothing"


class MultiprocExecutor(Executor):
    """Runs a worker process for each rank on this machine.

    The result of a step is rank 0's result, with the KV-connector reports of all ranks. If another
    rank fails while rank 0 waits for its tensors, the handle raises the error of that rank;
    otherwise the next call raises it.
    """

    max_world_size: ClassVar[int] = MAX_WORKERS
    takes_callables: ClassVar[bool] = False
    _forked: EngineDeadError | None = None

    def __init__(self, context: ExecutorContext) -> None:
        config = context.config
        check_result_size(config.worker.max_num_batched_tokens, config.max_logprobs)
        self.max_concurrent_steps = config.max_concurrent_steps
        self._options = MultiprocOptions.model_validate(dict(context.options))
        self._clock: Clock = MonotonicClock()
        self._closed = False
        self._num_commands = 0
        self._has_begun = False
        self._ranks = range(config.worker.tensor_parallel_size)
        self._workers = launch(context, self._clock)
        self._group, self._commands = self._workers.group, self._workers.commands
        self._end = finalize_in_owner(self, self._workers.close, 0.0)
        self._owner_pid = os.getpid()
        try:
            fault("multiproc.wait")
            deadline_s = _SHARE_OF_DEADLINE * config.start_timeout_s
            check_plugins(context.plugins, self._group.wait_until_ready(deadline_s, _enter))
        except BaseException:
            self._closed = True
            self._workers.close(_FAILED_STOP_S)
            self._end()
            raise
        gathers = config.worker.kv_connector is not None
        self._responses = ResponseReader(
            self._workers, self._clock, num_step_responses=len(self._ranks) if gathers else 1
        )
        on_fork_in_child(self._disown)

    def collective_rpc(
        self,
        operation: str | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call an operation by name on every worker and return the responses."""
        self._check_alive()
        check_rank(unique_reply_rank, len(self._ranks))
        if not isinstance(operation, str):
            raise ContractError(
                f"{operation!r} cannot be called in another process; pass the name of a worker's "
                'method, or "pkg.mod:function".'
            )
        with self._responses.lock:
            number = self._num_commands + 1
            call = WorkerCall(
                number=number,
                operation=operation,
                args=args,
                kwargs=kwargs or {},
                reply_rank=unique_reply_rank,
            )
            self._send(encode_call(call))
            handle = self._responses.await_call(number, unique_reply_rank)
        return handle if non_block else handle.result(timeout)

    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Send the command to run the model for `plan`."""
        if self._forked is not None:
            raise self._forked
        with self._responses.lock:
            self._send(encode_plan(plan))
            self._has_begun = True
            return _Executed(self, self._responses, self._num_commands)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Send the command to sample for the last plan of `execute_model`."""
        if self._forked is not None:
            raise self._forked
        with self._responses.lock:
            has_begun, self._has_begun = self._has_begun, False
            try:
                self._send(encode_sample(grammar))
            except EngineDeadError:
                if not has_begun or self._responses.has_step():
                    raise
                # Only this step was in flight, so its own error stopped the workers.
                raise self._group.cause() from None
            return self._responses.await_step(self._num_commands, self._options.step_timeout_s)

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker has exited, StalledError if one sends no heartbeat."""
        self._check_alive()
        silence_s = self.silence_s()
        if silence_s >= self._options.stall_s:
            raise StalledError(
                f"A worker sent no heartbeat for {silence_s:.1f} s: it is stopped or gets no CPU "
                "time."
            )

    def silence_s(self) -> float:
        """Return the age of the oldest worker heartbeat, in seconds."""
        return self._group.silence_s()

    def shutdown(self) -> None:
        """Let the workers finish their commands and exit. May be called twice."""
        fault("multiproc.shutdown")
        self._closed = True
        if self._end.alive and os.getpid() == self._owner_pid:
            self._workers.close(self._options.stop_timeout_s)
        self._end()

    def _disown(self) -> None:
        """Make every later call raise an error, before it uses a ring. Runs in a forked child."""
        self._forked = forked_error("this engine", self._owner_pid)
        self._responses.disown(self._forked)

    def _send(self, frame: bytes) -> None:
        """Put a command into the ring. The caller holds the lock."""
        self._check_alive()
        deadline_ns = self._clock.now_ns() + int(self._options.step_timeout_s * 1e9)
        while True:
            try:
                fault("multiproc.order")
                self._commands.send(frame, timeout_s=_ROOM_S)
                self._num_commands += 1
                return
            except TimeoutError as error:
                # A worker that waits for room in its response ring does not read commands either.
                self._responses.look()
                self._check_alive()
                if self._clock.now_ns() >= deadline_ns:
                    self._group.fail(EngineDeadError(f"the workers do not read commands: {error}"))
            except TransportError:
                raise self._group.cause() from None

    def _check_alive(self) -> None:
        if self._forked is not None:
            raise self._forked
        if self._closed:
            raise EngineDeadError("the workers are not available: the executor was shut down.")
        if self._group.failure is not None:
            raise EngineDeadError(f"the workers have failed: {self._group.failure}")


class _Executed:
    """The handle of `execute_model`: waits until rank 0 has executed the command."""

    __slots__ = ("_command", "_executor", "_responses")

    def __init__(self, executor: MultiprocExecutor, receiver: ResponseReader, command: int) -> None:
        self._executor = executor
        self._responses = receiver
        self._command = command

    def done(self) -> bool:
        """Return whether the command is known to be completed."""
        return self._responses.has_done(self._command)

    def result(self, timeout: float | None = None) -> None:
        """Wait until the command is completed. Raise its error."""
        if not self._responses.has_done(self._command):
            # The command has no response; the response to another command shows that it is
            # completed.
            self._executor.collective_rpc(_NOTHING, timeout=timeout)


def _enter(phase: str) -> bool:
    """Begin a phase of the engine's startup. Return whether the phase has its own deadline."""
    if phase in _OF_THE_START:
        enter_phase(phase)
    return phase in _OF_THE_START


def check_result_size(max_num_batched_tokens: int, max_logprobs: int) -> None:
    """Raise ConfigError if the log-probabilities of a step may exceed the response ring."""
    maximum = max_num_batched_tokens * 8 * (2 + max_logprobs)
    if maximum > MAX_FRAME_BYTES:
        raise ConfigError(
            f"max_num_batched_tokens={max_num_batched_tokens} with max_logprobs={max_logprobs} "
            f"gives results of up to {maximum >> 20} MiB per step, but a worker process can send "
            f"at most {MAX_FRAME_BYTES >> 20} MiB. Reduce one of the two options."
        )
