"""An executor and a worker without a model: each request that samples gets the same token.

They are used in benchmarks of the engine, and in tests that do not need meaningful tokens. A step
only counts the requests that sample. Token columns are created once per length and reused, because
results are immutable.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import cast

from dovetail.interfaces.executor import ExecutorContext, Handle, Ready
from dovetail.interfaces.kv_cache import KVCacheConfig, KVCacheSpec
from dovetail.interfaces.worker import GrammarOutput, ModelInfo, WorkerBase, WorkerContext
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.fakes.executor import FakeExecutor

TOKEN = 300
"""Not a special token in common vocabularies, so that detokenization gives a text."""
VOCAB_SIZE = 32_000


class NullWorker(WorkerBase):
    """A worker that samples `TOKEN` for every request, without any state or checks."""

    def __init__(self, context: WorkerContext | None = None) -> None:
        self._columns: dict[int, array[int]] = {}

    def init_device(self) -> None:
        """Do nothing."""

    def load_model(self) -> None:
        """Do nothing."""

    def get_model_info(self) -> ModelInfo:
        """Return a common vocabulary size."""
        return ModelInfo(vocab_size=VOCAB_SIZE)

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return no specs, since there are no layers."""
        return {}

    def determine_available_memory(self) -> int:
        """Return a constant number of bytes."""
        return 1 << 20

    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Do nothing."""

    def compile_or_warm_up_model(self) -> None:
        """Do nothing."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Store the plan for `sample_tokens`."""
        self._plan = plan

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Return `TOKEN` for each request that samples."""
        plan = self._plan
        count = bytes(plan.samples).count(1)
        token_ids = self._columns.get(count)
        if token_ids is None:
            token_ids = self._columns[count] = array("i", [TOKEN]) * count
        return ModelRunnerOutput(
            step_id=plan.step_id, num_sampled=plan.samples, token_ids=token_ids
        )

    def shutdown(self) -> None:
        """Do nothing."""


class NullExecutor(FakeExecutor):
    """Runs a `NullWorker` instead of the requested worker, with up to two concurrent steps."""

    max_concurrent_steps = 2

    def __init__(self, context: ExecutorContext | None = None) -> None:
        """context: not used. May be None."""
        self._dead = ""
        self._done: Handle[None] = Ready(None)
        self.worker: WorkerBase = NullWorker()

    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Store the plan for `sample_tokens`."""
        self.worker.execute_model(plan)
        return self._done

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Return `TOKEN` for each request that samples."""
        return Ready(cast("ModelRunnerOutput", self.worker.sample_tokens(grammar)))
