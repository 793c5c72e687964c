"""Workers that remember the logits after every token that they compute, whatever the plan was.

`Recording` is put before the worker of any torch device: it sees plans and the model, and changes
nothing. Depends on no device; on one that runs ahead of the host it waits after every step.
Legend: T tokens of the step, N tokens of a run, S sampled positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.interfaces import AttentionContext, RotaryArgs, WorkerContext
from dovetail.plan import SchedulerOutput
from dovetail_torch.worker import TorchWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run of one step. logits: after tokens [start, start + N) of the request, [N, V]."""

    request_id: str
    start: int
    logits: torch.Tensor


@dataclass(frozen=True)
class Unnarrowed:
    """An attention context by which a model continues with all tokens."""

    attention: AttentionContext

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Attend as ever."""
        return self.attention.attend(index, q_THD, k_TKD, v_TKD, rotary_args)

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return all rows."""
        return x_TD


class Recording(TorchWorker):
    """A worker with a memory of logits, in float32, on the host.

    Where a step sampled, the remembered logits are those that the sampler was given; elsewhere they
    are the model's head over the hidden states that the step computed.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._recorded: list[RecordedRun] = []
        self._request_ids: dict[int, str] = {}

    def load_model(self) -> None:
        """Load the model and listen to it."""
        super().load_model()
        model = self._model
        forward, self._head = model.forward, model.compute_logits

        def listen_to_forward(
            input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
        ) -> torch.Tensor:
            hidden = forward(input_ids_T, positions_T, attention)
            self._hidden_TD, self._logits_SV = hidden, None
            if len(hidden) != len(input_ids_T):  # keys and values go where they went before
                self._hidden_TD = forward(input_ids_T, positions_T, Unnarrowed(attention))
            return hidden

        def listen_to_head(hidden_SD: torch.Tensor) -> torch.Tensor:
            logits_SV = self._head(hidden_SD)
            if self._logits_SV is None:  # the sampler's come first; it may write to its own
                self._logits_SV = logits_SV.clone()
            return logits_SV

        model.forward, model.compute_logits = listen_to_forward, listen_to_head

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Execute the plan and remember the logits of its runs."""
        for request in plan.joins:
            self._request_ids[request.row] = request.request_id
        super().execute_model(plan)
        if not plan.empty:
            self._remember(plan)

    def take_recorded(self) -> list[RecordedRun]:
        """Return what was remembered since the last call."""
        taken, self._recorded = self._recorded, []
        return taken

    @torch.inference_mode()
    def _remember(self, plan: SchedulerOutput) -> None:
        runs_NV = self._head(self._hidden_TD).split(list(plan.num_tokens))
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
