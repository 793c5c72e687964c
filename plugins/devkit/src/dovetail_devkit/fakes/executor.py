"""A fake executor: synchronous, for any worker.

Every call completes before it returns, so each handle is ready. It runs one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.errors import EngineDeadError
from dovetail.executors.operation import SoleReply, check_rank, find_operation
from dovetail.interfaces.executor import Executor, ExecutorContext, Handle, Ready
from dovetail.interfaces.worker import GrammarOutput, WorkerBase, WorkerContext
from dovetail.plan import SchedulerOutput
from dovetail.plugins.extension import complete_worker_cls
from dovetail.result import ModelRunnerOutput


class FakeExecutor(Executor):
    """Calls one worker directly.

    worker: an instance of the context's worker class.
    """

    def __init__(self, context: ExecutorContext) -> None:
        self._dead = ""
        self.worker: WorkerBase = complete_worker_cls(context)(
            WorkerContext(
                config=context.config.worker,
                platform=context.platform,
                plugins=context.plugins,
                options=context.worker_options,
            )
        )
        try:
            self.worker.init_device()
            self.worker.load_model()
        except BaseException:
            self.shutdown()
            raise

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
        """Call an operation on the worker. The timeout is ignored."""
        self.check_health()
        check_rank(unique_reply_rank, 1)
        result = find_operation(self.worker, operation)(*args, **(kwargs or {}))
        reply = SoleReply(Ready(result), unique_reply_rank)
        return reply if non_block else reply.result()

    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Execute `plan` on the worker."""
        return Ready(self._try(self.worker.execute_model, plan))

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Sample tokens for the plan of the last `execute_model` call."""
        output = self._try(self.worker.sample_tokens, grammar)
        if not isinstance(output, ModelRunnerOutput):
            output = self._try(lambda handle: handle.result(), output)
        return Ready(output)

    def check_health(self) -> None:
        """Raise EngineDeadError after a failure or a shutdown."""
        if self._dead:
            raise EngineDeadError(f"the executor cannot continue: {self._dead}")

    def shutdown(self) -> None:
        """Shut the worker down."""
        self._dead = self._dead or "the executor was shut down"
        self.worker.shutdown()

    def _try(self, call: Callable[[Any], Any], argument: object) -> Any:
        self.check_health()
        try:
            return call(argument)
        except Exception as error:
            self._dead = repr(error)
            raise EngineDeadError(f"the worker failed: {error!r}") from error
