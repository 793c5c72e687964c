"""The workers of the executor suite, which check the order of calls, are slow, or fail.

They are defined at module level, so that an executor can create them in other processes. They
record events in a file in their model directory, which can be read after they have exited.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event, get_ident

from dovetail.errors import ModelError
from dovetail.interfaces.worker import GrammarOutput, WorkerContext
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.fakes.worker import FakeWorker, LateOutput

LOG = "worker.log"
REQUESTED = "requested failure"
SLOW_S = 0.05


class CallOrderWorker(FakeWorker):
    """A worker that checks the order of calls and has operations for `collective_rpc`."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._log = Path(context.config.model.model_dir) / LOG
        self._threads: set[int] = set()
        self._context = context

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Execute a plan, and record the thread."""
        self._threads.add(get_ident())
        super().execute_model(plan)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Sample, and record the thread."""
        self._threads.add(get_ident())
        return super().sample_tokens(grammar)

    def shutdown(self) -> None:
        """Record the shutdown in the file."""
        super().shutdown()
        self.note("shutdown")

    def note(self, text: str) -> None:
        """Add a line to the file."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def num_threads(self) -> int:
        """Return how many threads have called a step method."""
        return len(self._threads)

    def recorded_calls(self) -> list[str]:
        """Return the names of the methods called so far."""
        return list(self.calls)

    def add(self, left: int, *, right: int) -> int:
        """Return the sum of the arguments."""
        return left + right

    def location(self) -> dict[str, int | str]:
        """Return the rank of this worker and the world size."""
        context = self._context
        return {
            "rank": context.rank,
            "world_size": context.world_size,
            "rendezvous": context.rendezvous,
        }

    def fail_on(self, rank: int) -> None:
        """Raise an error on one rank, outside of a step."""
        if rank == self._context.rank:
            raise ModelError(f"{REQUESTED} of fail_on")

    def delay(self, seconds: float) -> str:
        """Sleep for `seconds`, then return "done"."""
        Event().wait(seconds)
        return "done"


class MovingWorker(CallOrderWorker):
    """A worker that returns KV-connector data, in a different step on each rank."""

    provides = frozenset({"kv_connector"})

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Sample, and report the finished transfers."""
        output = super().sample_tokens(grammar)
        return replace(output, kv_transfer=connector_data_of(self._context.rank, output.step_id))


def connector_data_of(rank: int, step_id: int) -> bytes:
    """Return the KV-connector data that a rank returns in a step, or b"" for none."""
    return f"rank {rank}, step {step_id}".encode() if (step_id + rank) % 3 else b""


class FailingWorker(CallOrderWorker):
    """A worker that fails when it executes step 2."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Execute a plan. Raise in step 2."""
        if plan.step_id == 2:
            raise RuntimeError(f"{REQUESTED} of execute_model")
        super().execute_model(plan)


class LateWorker(CallOrderWorker):
    """A worker that returns a handle for each step, as for an asynchronous device."""

    provides = frozenset({"async_output"})

    def sample_tokens(  # type: ignore[override]  # the contract allows it, the base class does not
        self, grammar: GrammarOutput | None = None
    ) -> LateOutput:
        """Sample, and return a handle to the result."""
        return LateOutput(super().sample_tokens(grammar))


class LateFailingWorker(LateWorker):
    """A worker that fails in step 2. `result` of the step's handle raises the error."""

    def sample_tokens(  # type: ignore[override]  # as above
        self, grammar: GrammarOutput | None = None
    ) -> LateOutput:
        """Sample. In step 2 the result is an error."""
        late = super().sample_tokens(grammar)
        if late.output.step_id == 2:
            late.error = RuntimeError(f"{REQUESTED} of a result")
        return late


class UnloadableWorker(CallOrderWorker):
    """A worker that cannot load its model."""

    def load_model(self) -> None:
        """Fail with a ModelError."""
        raise ModelError(f"{REQUESTED} of load_model")


class SlowWorker(CallOrderWorker):
    """A worker that executes each plan slowly, and records when a plan has been executed."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Execute a plan slowly. Record that the execution has ended, even if it fails."""
        Event().wait(SLOW_S)
        try:
            super().execute_model(plan)
        finally:
            self.note("executed")


def read_log(model_dir: Path) -> list[str]:
    """Return the records that the workers wrote to their model directory."""
    file = model_dir / LOG
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def count_calls(worker: CallOrderWorker, offset: int) -> int:
    """Return how many calls a worker has recorded, plus `offset`. For `collective_rpc`."""
    return len(worker.recorded_calls()) + offset
