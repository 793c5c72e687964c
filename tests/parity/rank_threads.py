"""An executor that runs each rank's worker in a thread of this process, in one process group.

It is for tests that inspect every rank. The tests of the `multiproc` executor cover separate
processes. Native kernels have one thread pool per process, so these ranks use torch operations.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dovetail.executors.operation import find_operation
from dovetail.interfaces import (
    Executor,
    ExecutorContext,
    GrammarOutput,
    Handle,
    WorkerBase,
    WorkerContext,
)
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput

TORCH_PARTS = {"linear_method": "torch", "ops": "torch", "attention_backend": "torch"}
"""Engine options that run ranks as threads."""


class RankThreads(Executor):
    """Runs `tensor_parallel_size` workers. The engine gets the results of rank 0."""

    max_world_size = 8

    def __init__(self, context: ExecutorContext) -> None:
        size = context.config.worker.tensor_parallel_size
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "store")
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(size)]
        self.workers: list[WorkerBase] = [
            context.worker_cls(
                WorkerContext(
                    config=context.config.worker,
                    platform=context.platform,
                    plugins=context.plugins,
                    rank=rank,
                    local_rank=rank,
                    world_size=size,
                    rendezvous=f"file://{path}" if size > 1 else "",
                    options=context.worker_options,
                )
            )
            for rank in range(size)
        ]
        try:
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
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
        """Call an operation in every rank's thread and return all results."""
        futures = self._begin(operation, *args, **(kwargs or {}))
        results = [future.result(timeout) for future in futures]
        return results if unique_reply_rank is None else results[unique_reply_rank]

    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Run the model for `plan` on all ranks."""
        return self._begin("execute_model", plan)[0]

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Sample on all ranks and compare the tokens with those of rank 0."""
        outputs = [future.result() for future in self._begin("sample_tokens", grammar)]
        assert all(output.token_ids == outputs[0].token_ids for output in outputs), outputs
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(outputs[0])
        return done

    def check_health(self) -> None:
        """Do nothing: threads do not exit unexpectedly."""

    def shutdown(self) -> None:
        """Shut the workers down."""
        for worker, thread in zip(self.workers, self._threads, strict=True):
            thread.submit(worker.shutdown).result()
            thread.shutdown()
        self._folder.cleanup()

    def _begin(self, operation: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [
            thread.submit(find_operation(worker, operation), *args, **kwargs)
            for worker, thread in zip(self.workers, self._threads, strict=True)
        ]
