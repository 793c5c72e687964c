"""A real engine in this process that can run several workloads in sequence."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dovetail.config import EngineArgs
from dovetail.engine.start import StartedEngine, start_engine
from dovetail.errors import ConfigError
from dovetail.interfaces import FullAttentionSpec
from dovetail.plan import SchedulerOutput
from dovetail_lab.real_engine.latched_clock import LatchedClock
from dovetail_lab.real_engine.real_executor import ModelPlans, NoTimes, RealExecutor
from dovetail_lab.simulation.engine import RunLimits, SimulatedEngine
from dovetail_lab.simulation.results import RunResult, StepColumns
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.step_times.samples import StepRecorder
from dovetail_lab.workloads.workload import Workload, WorkloadRequest


class RealEngine:
    """A loaded model, and workers for setups with one block size and pipeline depth.

    A run may use fewer blocks and batch slots than the engine has. Not thread-safe. Call `close`
    after use.
    """

    def __init__(
        self, model: str, largest: EngineSetup, engine_options: Mapping[str, Any] | None = None
    ) -> None:
        """Load the model.

        largest: a setup with the maximum of blocks, batch slots and tokens per step.
        engine_options: further fields of `EngineArgs`. Raises DovetailError if the engine cannot be
        created, and ConfigError unless the model's KV cache is one full-attention group.
        """
        limits = largest.limits
        options: dict[str, Any] = {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "block_size": largest.block_size,
            "num_gpu_blocks_override": largest.num_blocks - 1,
            "pipeline_depth": largest.depth,
            "executor_backend": "uniproc",
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            **(engine_options or {}),
        }
        requested = EngineArgs(model, **options).create_engine_config()
        self.largest = largest
        self.started: StartedEngine = start_engine(requested)
        groups = self.started.kv_cache.groups
        if len(groups) != 1 or not _is_plain(groups[0].spec):
            self.close()
            raise ConfigError(
                f"model={model!r} has a KV cache with {len(groups)} groups of layers or with "
                "sliding windows; the lab needs one group with full attention."
            )
        self._plans = ModelPlans(self.started.model_info.vocab_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut the engine down. May be called twice."""
        self.started.core.shutdown()

    def run(
        self,
        workload: Workload,
        setup: EngineSetup,
        *,
        record_steps: bool = True,
        decision_log: Path | None = None,
        limits: RunLimits | None = None,
        recorder: StepRecorder | None = None,
    ) -> RunResult:
        """Run a workload in real time. Return the same type of result as the simulator.

        recorder: stores the times of the steps; None to store nothing. Raises ConfigError if the
        setup does not fit this engine. If the policy or a step fails, the result has an error.
        """
        self.check(setup)
        self._plans.begin_run()
        run = _RealRun(workload.requests, setup, self, decision_log)
        run.recorder = recorder
        if record_steps:
            run.steps = StepColumns()
        gc.collect()
        freezes = not gc.get_freeze_count()  # `unfreeze` would also undo a freeze of the program
        if freezes:
            gc.freeze()
        try:
            run.clock.restart()
            return run.run(limits or RunLimits())
        finally:
            if freezes:
                gc.unfreeze()

    def check(self, setup: EngineSetup) -> None:
        """Raise ConfigError if a setup does not fit this engine."""
        mine, other = self.largest, setup
        for name in ("block_size", "depth"):
            if getattr(mine, name) != getattr(other, name):
                raise ConfigError(
                    f"{name}={getattr(other, name)} differs from the engine's {getattr(mine, name)}"
                )
        pairs: Sequence[tuple[str, int, int]] = [
            ("num_blocks", mine.num_blocks, other.num_blocks),
            *(
                (name, getattr(mine.limits, name), getattr(other.limits, name))
                for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
            ),
        ]
        for name, maximum, value in pairs:
            if value > maximum:
                raise ConfigError(f"{name}={value} is above the engine's maximum of {maximum}")
        if other.limits.max_model_len > self.started.max_model_len:
            raise ConfigError(
                f"max_model_len={other.limits.max_model_len} is above the maximum of the model and "
                f"its cache, {self.started.max_model_len}"
            )


class _RealRun(SimulatedEngine):
    """One run: the simulator's loop with the clock and the executor of the real engine."""

    clock: LatchedClock
    recorder: StepRecorder | None = None

    def __init__(
        self,
        requests: Sequence[WorkloadRequest],
        setup: EngineSetup,
        engine: RealEngine,
        decision_log: Path | None,
    ) -> None:
        self._engine = engine
        super().__init__(
            requests, setup, NoTimes(), decision_log=decision_log, clock=LatchedClock()
        )
        self.macro_steps = False

    def _make_executor(self) -> RealExecutor:
        engine = self._engine
        return RealExecutor(
            engine.started.core.executor, engine._plans, self.table, self.clock, observer=self
        )

    def advance(self) -> bool:
        """Read the clock, then add requests and run a step or wait. Return False at the end."""
        now_ns = self.clock.latch()
        if self.recorder is not None:
            self.recorder.resume(now_ns)
        return super().advance()

    def on_step(self, plan: SchedulerOutput, start_ns: int, end_ns: int) -> None:
        """Record an executed step."""
        super().on_step(plan, start_ns, end_ns)
        if self.recorder is not None:
            self.recorder.end_step(plan, start_ns, end_ns)


def _is_plain(spec: object) -> bool:
    return isinstance(spec, FullAttentionSpec) and not spec.sliding_window
