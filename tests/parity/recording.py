"""Workers that record the logits after every token that they compute, for any plan.

`Recording` is a mixin for the worker of any torch device: it reads plans and the model and changes
nothing. On an asynchronous device it waits after every step. Dimensions: T tokens of the step, N
tokens of a request in the step, S sampled positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dovetail.interfaces import (
    AttentionContext,
    LayerState,
    RotaryArgs,
    StateTensor,
    WorkerContext,
)
from dovetail.plan import SchedulerOutput
from dovetail_torch.graph_dispatcher import Outputs
from dovetail_torch.runner.device_inputs import DeviceBatch
from dovetail_torch.worker import TorchWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The logits of one request in a step: [N, V], after each of the tokens [start, start + N)."""

    request_id: str
    start: int
    logits: torch.Tensor


@dataclass(frozen=True)
class AllTokensContext:
    """An attention context that selects all tokens, so that the model returns all hidden states."""

    attention: AttentionContext

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Attend as the wrapped context does."""
        return self.attention.attend(index, q_THD, k_TKD, v_TKD, rotary_args)

    def state(self, index: int, tensors: Sequence[StateTensor]) -> LayerState:
        """Return the states of the wrapped context."""
        return self.attention.state(index, tensors)

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return all rows."""
        return x_TD


class Recording(TorchWorker):
    """A worker that records logits in float32 on the host.

    At sampled positions it records the logits that the sampler received; at other positions it
    applies the LM head to the hidden states of the step.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._recorded: list[RecordedRun] = []
        self._request_ids: dict[int, str] = {}

    def load_model(self) -> None:
        """Load the model and wrap its methods."""
        super().load_model()
        model = self._model
        forward, self._compute_logits = model.forward, model.compute_logits

        def listen_to_forward(
            input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
        ) -> torch.Tensor:
            self._logits_SV = None
            if self._has_states:  # a second pass would read the states that the first one wrote
                self._hidden_TD = forward(input_ids_T, positions_T, AllTokensContext(attention))
                return self._hidden_TD
            self._hidden_TD = hidden = forward(input_ids_T, positions_T, attention)
            if len(hidden) != len(input_ids_T):  # keys and values are written as before
                self._hidden_TD = forward(input_ids_T, positions_T, AllTokensContext(attention))
            return hidden

        def listen_to_head(hidden_SD: torch.Tensor) -> torch.Tensor:
            logits_SV = self._compute_logits(hidden_SD)
            if (
                self._logits_SV is None
            ):  # logits for the sampler come first; the sampler may write to them
                self._logits_SV = logits_SV.clone()
            return logits_SV

        model.forward, model.compute_logits = listen_to_forward, listen_to_head

    def compile_or_warm_up_model(self) -> None:
        """Warm up, and listen to the steps that graphs replay, which do not call the model."""
        super().compile_or_warm_up_model()
        graphs = self._runner._step_graphs
        if graphs is None:
            return
        replay = graphs.run

        def listen_to_replays(batch: DeviceBatch) -> Outputs | None:
            outputs = replay(batch)
            if outputs is not None:
                logits_SV = outputs[1].clone() if len(outputs) > 1 else None
                self._hidden_TD, self._logits_SV = outputs[0], logits_SV
            return outputs

        graphs.run = listen_to_replays

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Execute the plan and record the logits of its requests."""
        for request in plan.joins:
            self._request_ids[request.row] = request.request_id
        super().execute_model(plan)
        if not plan.empty:
            self._remember(plan)

    def take_recorded(self) -> list[RecordedRun]:
        """Return the logits recorded since the last call."""
        taken, self._recorded = self._recorded, []
        return taken

    @torch.inference_mode()
    def _remember(self, plan: SchedulerOutput) -> None:
        runs_NV = self._compute_logits(self._hidden_TD).split(list(plan.num_tokens))
        num_sampled = 0
        for run, logits_NV in enumerate(runs_NV):
            if plan.samples[run]:
                logits_NV[-1] = self._logits_SV[num_sampled]
                num_sampled += 1
            self._recorded.append(
                RecordedRun(
                    request_id=self._request_ids[plan.rows[run]],
                    start=plan.starts[run],
                    logits=logits_NV.float().cpu(),
                )
            )
        assert not num_sampled or num_sampled == len(self._logits_SV)
