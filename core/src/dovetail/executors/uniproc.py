"""The executor with one worker in this process.

With pipeline depth 1, a call executes its work before it returns. With depth 2, a thread of the
executor executes the calls in order, while the engine plans the next step. A worker that provides
"async_output" needs no thread: calls are made directly, and the result is awaited when it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar, cast

from dovetail.errors import DovetailError, EngineDeadError, PluginLoadError, describe_failure
from dovetail.executors.operation import SoleReply, check_rank, find_operation
from dovetail.executors.worker_spec import construct_worker, has_async_output
from dovetail.faults import fault
from dovetail.interfaces.executor import Executor, ExecutorContext, Handle, Ready
from dovetail.interfaces.worker import GrammarOutput
from dovetail.plan import SchedulerOutput
from dovetail.processes.startup_phases import enter_phase
from dovetail.result import ModelRunnerOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UniprocExecutor(Executor):
    """Runs one worker in this process."""

    def __init__(self, context: ExecutorContext) -> None:
        self.max_concurrent_steps = context.config.max_concurrent_steps
        self._failure: BaseException | None = None
        self._closed = False
        self._worker = construct_worker(context)
        self._is_late = has_async_output(self._worker)
        self._thread = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="dovetail-worker")
            if self.max_concurrent_steps > 1 and not self._is_late
            else None
        )
        try:
            for phase in ("init_device", "load_model"):
                enter_phase(phase)
                self._start(phase)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, phase: str) -> None:
        """Run a startup phase of the worker. Raise PluginLoadError with the worker's name."""
        try:
            self.collective_rpc(phase)
        except (DovetailError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginLoadError(
                f"The worker {_name(self._worker)} failed in {phase}: {describe_failure(error)}.\n"
                "Fix the cause, or choose another worker with worker_cls."
            ) from error

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
        """Call an operation on the worker. Return the result, in a list if no rank is given."""
        self.check_health()
        check_rank(unique_reply_rank, 1)
        fault("uniproc.call")
        call = find_operation(self._worker, operation)
        reply = SoleReply(self._submit(call, *args, **(kwargs or {})), unique_reply_rank)
        return reply if non_block else reply.result(timeout)

    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Run the model for `plan`."""
        fault("uniproc.execute_model")
        return self._step(self._worker.execute_model, plan)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Sample for the plan of the last `execute_model` call."""
        fault("uniproc.sample_tokens")
        if not self._is_late:
            sample = cast("Callable[[Any], ModelRunnerOutput]", self._worker.sample_tokens)
            return self._step(sample, grammar)
        sampled = self._step(self._worker.sample_tokens, grammar).result()
        if isinstance(sampled, ModelRunnerOutput):
            return Ready(sampled)
        late = LateResult(sampled, self._fail)
        return Ready(late.result()) if self.max_concurrent_steps == 1 else late

    def check_health(self) -> None:
        """Raise EngineDeadError if the worker has failed or was shut down."""
        if self._closed or self._failure is not None:
            if self._failure is None:
                raise EngineDeadError("the worker was shut down; create a new engine.")
            raise EngineDeadError(f"the worker has failed: {self._failure!r}")

    def shutdown(self) -> None:
        """Shut the worker down after its current work. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        fault("uniproc.shutdown")
        try:
            self._worker.shutdown()
        except Exception as error:
            # Only logged, so that it does not hide the reason for the shutdown.
            failure = describe_failure(error)
            logger.warning("The worker %s failed to shut down: %s", _name(self._worker), failure)

    def _submit(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> Handle[T]:
        if self._thread is None:
            return Ready(call(*args, **kwargs))
        future: Future[T] = self._thread.submit(call, *args, **kwargs)
        return future

    def _step(self, call: Callable[..., T], argument: Any) -> Handle[T]:
        self.check_health()
        return self._submit(self._guarded, call, argument)

    def _guarded(self, call: Callable[[Any], T], argument: Any) -> T:
        """Execute one half of a step.

        After a failure every call fails: the state of the requests is unknown.
        """
        if self._failure is not None:
            raise EngineDeadError(f"the worker has failed: {self._failure!r}")
        try:
            return call(argument)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        """Store the first failure, and raise `error` as a DovetailError."""
        self._failure = self._failure or error
        if isinstance(error, DovetailError):
            raise error
        raise EngineDeadError(f"the worker failed: {type(error).__name__}: {error}") from error


def _name(worker: object) -> str:
    return f"{type(worker).__module__}:{type(worker).__qualname__}"


class LateResult:
    """The handle of a step. Wraps the worker's handle and reports its failure to the executor."""

    __slots__ = ("_fail", "_handle")

    def __init__(
        self, handle: Handle[ModelRunnerOutput], fail: Callable[[Exception], NoReturn]
    ) -> None:
        """Wrap `handle`.

        fail: called with the handle's error, and raises the error for the caller.
        """
        self._handle = handle
        self._fail = fail

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""
        return self._handle.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the step, at most `timeout` seconds. Raise its error."""
        try:
            return self._handle.result(timeout)
        except Exception as error:
            if timeout is not None and isinstance(error, TimeoutError):
                raise
            self._fail(error)
