"""The model runner of a pooling model: it computes the pooled results of a plan.

It gathers inputs like `ModelRunner`, but samples no tokens. This module does not depend on the
scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dovetail.interfaces import GrammarOutput
from dovetail.interfaces.model import TOKEN_TYPE_BIT
from dovetail.plan import SchedulerOutput, StepBuilder
from dovetail.result import ModelRunnerOutput
from dovetail_torch.pooling.pooler import Pooler, PoolerHead
from dovetail_torch.runner.input_batch import InputBatch
from dovetail_torch.runner.kv_cache import AttentionState
from dovetail_torch.runner.loaded_model import LoadedModel
from dovetail_torch.runner.model_runner import ModelRunner
from dovetail_torch.runner.step_outputs import Output
from dovetail_torch.runner.step_reports import StepReports

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledStep:
    """An executed plan. pooled: results by position in the plan."""

    plan: SchedulerOutput
    batch: InputBatch | None = None
    pooled: dict[int, torch.Tensor] = field(default_factory=dict)


class PoolingRunner(ModelRunner):
    """Runs one pooling model."""

    def __init__(self, loaded: LoadedModel, attention: AttentionState, head: PoolerHead) -> None:
        super().__init__(loaded, attention)
        self._pooler = Pooler(head)
        self._has_types = "token_types" in getattr(type(loaded.model), "provides", ())
        self._pooled_step = _PooledStep(plan=StepBuilder().build())

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan, run the model and pool its hidden states."""
        for row in plan.leaves:
            self._pooler.leave(row)
        for request in plan.joins:
            self._pooler.join(request)
        batch = self._path.inputs.take(plan)
        if batch is None:
            self._pooled_step = _PooledStep(plan=plan)
            return
        self._attention.table.metadata = [
            builder.build(batch.attention[group]) for builder, group in self._attention.builders
        ]
        needed = self._pooler.needed(batch)
        self._attention.table.needed_S = None if needed is None else self._upload(needed)
        if self._has_types:
            self._mark_second_texts(batch)
        hidden_TD = self.model.forward(batch.input_ids_T, batch.positions_T, self._attention.table)
        self._pooled_step = _PooledStep(
            plan=plan, batch=batch, pooled=self._pooler.pool(batch, hidden_TD)
        )

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Output:
        """Return the pooled results of the last executed plan."""
        step = self._pooled_step
        if step.batch is None:
            return ModelRunnerOutput(
                step_id=step.plan.step_id,
                num_sampled=step.plan.samples,
                token_ids=array("i"),
            )
        reports = StepReports(runs=step.batch.sampling_runs, pooled=step.pooled)
        return self._path.outputs.deliver(step.plan, step.batch, step.batch.last_S[:0], reports)

    def warm_up(self) -> None:
        """Run the kernels of a step once, before the first request."""
        limits = self._limits
        maximum = min(limits.max_num_batched_tokens, limits.max_model_len)
        self.loaded.dummy_run(min(_WARM_UP_TOKENS, maximum), 1)

    def run_sizes(self, sizes: Sequence[int]) -> None:
        """Run the model once for each size (number of tokens, limited to the maximum)."""
        for size in sizes:
            self.loaded.dummy_run(min(size, self._limits.max_num_batched_tokens), 1)

    def _mark_second_texts(self, batch: InputBatch) -> None:
        """Set the bit of token type 1 in the ids of the second string of each pair."""
        for run, row in enumerate(batch.rows.tolist()):
            position = self._pooler.second_text_start(row)
            count, start = batch.plan.num_tokens[run], batch.plan.starts[run]
            if not position or position >= start + count:
                continue
            first = int(batch.first_R[run])
            begin = first + max(0, position - start)
            batch.input_ids_T[begin : first + count] += 1 << TOKEN_TYPE_BIT
