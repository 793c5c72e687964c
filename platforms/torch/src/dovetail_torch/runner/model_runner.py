"""The model runner: computes the logits and tokens of a plan.

It keeps the state of each row, gathers the inputs of a step, runs the model and samples. This
module does not depend on the scheduler, the allocation of blocks or the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch

from dovetail.interfaces import GrammarOutput, StepExtension
from dovetail.plan import SchedulerOutput, StepBuilder
from dovetail.result import ModelRunnerOutput
from dovetail_torch.graph_dispatcher import GraphCounts, GraphDispatcher, Outputs
from dovetail_torch.graph_provider import BatchDescriptor
from dovetail_torch.runner.device_inputs import DeviceBatch
from dovetail_torch.runner.input_batch import InputBatch
from dovetail_torch.runner.kv_cache import AttentionState
from dovetail_torch.runner.loaded_model import LoadedModel
from dovetail_torch.runner.staging import Staging
from dovetail_torch.runner.step_outputs import Output
from dovetail_torch.runner.step_path import device_path, host_path
from dovetail_torch.runner.step_reports import NO_REPORTS, StepReports
from dovetail_torch.runner.warm_up import run_step, warm_up
from dovetail_torch.sampling import GrammarMask, SampledTokens, Sampler
from dovetail_torch.sampling.device_access import DeviceAccess, plain_access
from dovetail_torch.sampling.logprobs import Measured, join_measured, measure
from dovetail_torch.step_extensions import StepExtensions

_WARM_UP_TOKENS = 8
_POSITIONS_AT_ONCE = 256
"""Maximum number of prompt positions with logits in memory, for prompt log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An executed plan that is not sampled yet.

    batch: the gathered inputs; None if the plan is empty.
    outputs: hidden states, logits and, if all requests take the most likely token, the tokens.
    prompts: prompt log-probabilities, by position in the plan.
    """

    plan: SchedulerOutput
    batch: InputBatch | None = None
    outputs: Outputs = ()
    prompts: Mapping[int, Measured] = field(default_factory=dict)


class ModelRunner:
    """Runs one model on one device. Created when the KV cache exists."""

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionState,
        extensions: Mapping[str, StepExtension] = MappingProxyType({}),
    ) -> None:
        """attention: memory of the cache, attention layers and builders.

        extensions: step extensions, in order, by the names that messages use for them.
        """
        self.model = loaded.model
        self.loaded = loaded
        self._limits = limits = loaded.limits
        self._attention = attention
        parts = loaded.device_parts
        self._graphs = GraphDispatcher(
            loaded.model, parts.graph_provider, parts.best_tokens, attention.table.save_states
        )
        self._first_1 = torch.zeros(1, dtype=torch.int64, device=limits.device)
        self._step = _Step(plan=StepBuilder().build())
        staging = None
        access = plain_access(limits.device)
        if parts.asynchronous is not None:
            staging = Staging(limits.device, parts.asynchronous)
            access = DeviceAccess(
                upload=staging.upload, may_wait=False, draw_tokens=parts.draw_tokens
            )
        self._upload = access.upload
        self._extensions = StepExtensions(extensions, access.upload)
        self._sampler = Sampler(
            num_rows=limits.max_num_seqs,
            vocab_size=loaded.vocab_size,
            device=limits.device,
            extensions=self._extensions,
            best_tokens=parts.best_tokens,
            mask_tokens=parts.mask_tokens,
            access=access,
        )
        if staging is None:
            self._path = host_path(loaded, attention)
        else:
            self._path = device_path(loaded, attention, staging, self._sampler)
        self._step_graphs = self._path.graphs

    @property
    def graph_counts(self) -> GraphCounts:
        """Counts of eager, captured and replayed steps."""
        return self._graphs.counts if self._step_graphs is None else self._step_graphs.counts

    @property
    def cache_pages(self) -> tuple[torch.Tensor, ...]:
        """The cache's memory: one uint8 [N, P] tensor per buffer, whose row b is block b.

        The tuple is empty if the cache is not stored in pages.
        """
        return self._attention.buffers.pages_NP

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan and run the model. Keep the logits for `sample_tokens`."""
        if self._path.continuation.follows(plan):
            self._step = self._continue(plan)
        else:
            self._step = self._begin(plan)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Output:
        """Sample from the logits of the last executed plan.

        Returns a handle on devices that work asynchronously, unless the plan is empty.
        """
        step, report = self._step, None
        plan, batch, outputs = step.plan, step.batch, step.outputs
        if batch is None:
            return ModelRunnerOutput(
                step_id=plan.step_id, num_sampled=plan.samples, token_ids=array("i")
            )
        if not batch.sampling_rows:
            token_ids_S = batch.last_S[:0]
        elif len(outputs) > 2 and grammar is None:
            token_ids_S = outputs[2]
        else:
            sampled = self._sample(batch, outputs[1], grammar)
            token_ids_S, report = sampled.token_ids, sampled.report
        extensions, errors = self._extensions, NO_REPORTS.errors
        if extensions.rows:
            extensions.after_sampling(batch.sampling_rows, token_ids_S)
        if extensions.errors:
            errors = extensions.run_errors(plan)
        reports = NO_REPORTS
        if step.prompts or report is not None or errors:
            reports = StepReports(
                runs=batch.sampling_runs, sampled=report, prompts=step.prompts, errors=errors
            )
        return self._path.outputs.deliver(plan, batch, token_ids_S, reports)

    def warm_up(self) -> None:
        """Run the kernels of a step once, before the first request.

        On asynchronous devices these are complete steps, of one row and of several.
        On other devices only the model runs, once, because a run reads all weights.
        """
        limits = self._limits
        maximum = min(limits.max_num_batched_tokens, limits.max_model_len)
        room = min(maximum, limits.max_model_len - 2)  # for two sampled tokens
        if self.loaded.device_parts.asynchronous is None or room < 1:
            self.loaded.dummy_run(min(_WARM_UP_TOKENS, maximum), 1)
        else:
            warm_up(self, self._sampler, limits.max_num_seqs, room)
            if self._step_graphs is not None:
                parts = self.loaded.device_parts
                self._step_graphs.capture(progress=parts.shows_progress)

    def run_sizes(self, sizes: Sequence[int]) -> None:
        """Run a step of each size (number of tokens, limited to the maximum) on unused rows."""
        limits = self._limits
        row_tokens = max(1, min(limits.max_num_batched_tokens, limits.max_model_len - 2))
        maximum = min(limits.max_num_batched_tokens, limits.max_num_seqs * row_tokens)
        for size in sizes:
            run_step(self, self._sampler, min(size, maximum), row_tokens)

    def shutdown(self) -> None:
        """Wait for outstanding results. May be called twice.

        Does not raise errors of those results: the reader of a result gets its error.
        """
        self._path.outputs.settle()

    @torch.inference_mode()
    def _begin(self, plan: SchedulerOutput) -> _Step:
        """Apply the plan, gather its inputs and run the model."""
        self._path.continuation.end()
        for row in plan.leaves:
            self._extensions.leave(row)
            self._sampler.leave(row)
        for request in plan.joins:
            self._extensions.join(request)
            self._sampler.join(request)
        batch = self._path.inputs.take(plan)
        if batch is None:
            return _Step(plan=plan)
        if self._extensions.rows:
            self._extensions.before_forward(plan, batch.first_R)
        outputs = self._forward(batch, plan)
        prompts = self._prompt_logprobs(batch, outputs[0])
        return _Step(plan=plan, batch=batch, outputs=outputs, prompts=prompts)

    def _continue(self, plan: SchedulerOutput) -> _Step:
        """Advance the inputs of the last step by one token, and run the model."""
        batch = self._path.continuation.batch
        assert batch is not None, "the step to continue has no batch"
        self._path.continuation.advance()
        if self._extensions.rows:
            self._extensions.before_forward(plan, batch.first_R)
        outputs = self._graphs.replay(self._describe(batch))
        if outputs is None:
            outputs = self._run(batch)
        return _Step(plan=plan, batch=batch, outputs=outputs)

    def _forward(self, batch: InputBatch, plan: SchedulerOutput) -> Outputs:
        """Return the hidden states of all tokens, and the logits of the requests that sample."""
        replayed = None
        if self._step_graphs is not None and isinstance(batch, DeviceBatch):
            replayed = self._step_graphs.run(batch)
        needed_S = None
        if replayed is None:
            self._attention.table.metadata = [
                builder.build(batch.attention[group]) for builder, group in self._attention.builders
            ]
            self._attention.table.needed_S = needed_S = self._needed(batch)
        outputs = self._run(batch) if replayed is None else replayed
        if len(outputs) > 1 and not self._reads_hidden_states(batch):
            self._path.continuation.begin(batch)
            return outputs
        hidden_TD = outputs[0]
        if self._reads_hidden_states(batch):
            hidden_TD = self._extensions.hidden_states(plan, batch.first_R, hidden_TD)
        if not batch.sampling_rows:
            return hidden_TD, hidden_TD[:0]
        if needed_S is None or len(hidden_TD) != len(needed_S):  # the model kept all tokens
            return hidden_TD, self.model.compute_logits(hidden_TD.index_select(0, batch.last_S))
        return hidden_TD, self.model.compute_logits(hidden_TD)

    def _needed(self, batch: InputBatch) -> torch.Tensor | None:
        """Return the tokens whose hidden states the step needs, int64 [S], or None for all.

        Returns None if a captured graph for this number of tokens may sample for any request. If no
        request samples, returns the first token, because operations need at least one row.
        """
        if len(batch.sampling_runs) == batch.plan.total_num_tokens:
            return None
        if self._graphs.keeps(self._describe(batch)):
            return None
        if (self._path.rows.num_prompt_logprobs[batch.rows] >= 0).any():
            return None
        if self._reads_hidden_states(batch):
            return None
        return batch.last_S if batch.sampling_rows else self._first_1

    @torch.inference_mode()
    def _run(self, batch: InputBatch) -> Outputs:
        return self._graphs.run(
            batch.input_ids_T,
            batch.positions_T,
            self._attention.table,
            self._describe(batch),
        )

    def _describe(self, batch: InputBatch) -> BatchDescriptor:
        # If an extension runs between the model and its head, they cannot run as one graph.
        uniform = len(batch.sampling_rows) == batch.plan.total_num_tokens
        uniform = uniform and not self._reads_hidden_states(batch)
        return BatchDescriptor(
            num_tokens=batch.plan.total_num_tokens,
            num_requests=len(batch.rows),
            uniform=uniform,
            greedy=uniform and self._sampler.takes_best(batch.sampling_rows),
        )

    def _reads_hidden_states(self, batch: InputBatch) -> bool:
        rows = self._extensions.hidden_rows
        return bool(rows) and not rows.isdisjoint(batch.rows.tolist())

    @torch.inference_mode()
    def _sample(
        self, batch: InputBatch, logits_SV: torch.Tensor, grammar: GrammarOutput | None
    ) -> SampledTokens:
        """Return the tokens, in the order of the requests that sample."""
        mask = None if grammar is None else self._mask(grammar, batch.sampling_runs)
        return self._sampler.sample(logits_SV, batch.sampling_rows, mask, batch.numbers)

    def _mask(self, grammar: GrammarOutput, runs: np.ndarray) -> GrammarMask:
        return GrammarMask.of(grammar, runs.tolist(), self.loaded.vocab_size, self._upload)

    def _prompt_logprobs(self, batch: InputBatch, hidden_TD: torch.Tensor) -> dict[int, Measured]:
        """Return the log-probabilities of prompt tokens, for the requests that need them."""
        if len(batch.sampling_runs) == batch.plan.total_num_tokens:
            return {}  # the step has only decodes, which have no prompt tokens
        rows = self._path.rows
        num_logprobs = rows.num_prompt_logprobs[batch.rows]
        by_row = {}
        for run in np.flatnonzero(num_logprobs >= 0).tolist():
            row = int(batch.rows[run])
            start = int(batch.plan.starts[run])
            end = min(int(batch.ends[run]), int(rows.num_prompt_tokens[row]) - 1)
            if end <= start:
                continue
            first = int(batch.first_R[run])
            hidden_PD = hidden_TD[first : first + end - start]
            targets_P = rows.token_ids_RL[row, start + 1 : end + 1].to(torch.int64)
            by_row[run] = self._measure(hidden_PD, targets_P, int(num_logprobs[run]))
        return by_row

    def _measure(
        self, hidden_PD: torch.Tensor, targets_P: torch.Tensor, num_logprobs: int
    ) -> Measured:
        parts = []
        for start in range(0, len(hidden_PD), _POSITIONS_AT_ONCE):
            part = slice(start, start + _POSITIONS_AT_ONCE)
            logits_PV = self.model.compute_logits(hidden_PD[part])
            parts.append(measure(logits_PV, targets_P[part], num_logprobs))
        return join_measured(parts)
