"""Appends the sampled tokens of a step to their rows and creates its result.

If the host computes, tokens are available immediately. An asynchronous device writes them to their
rows and copies them to the host later: the result is a handle.
This module does not depend on the model or the sampler. Dimensions: S requests that sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from dovetail.interfaces import Handle
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_torch.runner.continuation import Continuable
from dovetail_torch.runner.device_inputs import DeviceInputs
from dovetail_torch.runner.input_batch import InputBatch, InputGatherer
from dovetail_torch.runner.late_output import FetchRing
from dovetail_torch.runner.step_reports import StepReports, pooled_result

Output = ModelRunnerOutput | Handle[ModelRunnerOutput]

_NOT_FINITE = "the model's result has NaN or infinite values; choose another dtype, such as float32"


class StepOutputs(Protocol):
    """Appends sampled tokens to their rows and creates the result of a step."""

    def deliver(
        self,
        plan: SchedulerOutput,
        batch: InputBatch,
        token_ids_S: torch.Tensor,
        reports: StepReports,
    ) -> Output:
        """Return the result of `plan`. token_ids_S: int64, on the device.

        batch: the batch of this plan, or of the plan that it continues.
        """

    def settle(self) -> None:
        """Wait for outstanding results."""


class HostOutputs:
    """Results of a synchronous device."""

    def __init__(self, inputs: InputGatherer, continuation: Continuable) -> None:
        self._inputs = inputs
        self._continuation = continuation

    def deliver(
        self,
        plan: SchedulerOutput,
        batch: InputBatch,
        token_ids_S: torch.Tensor,
        reports: StepReports,
    ) -> ModelRunnerOutput:
        """Append the tokens to their rows and return the result."""
        token_ids = array("i", token_ids_S.tolist())
        if reports.pooled is not None:
            return _pooled_output(plan, reports, reports.tensors())
        if batch is self._continuation.batch:
            self._continuation.append(token_ids)
        else:
            self._inputs.append(batch, token_ids_S)
        return _output(plan, token_ids, reports, reports.tensors())

    def settle(self) -> None:
        """Do nothing: no result is outstanding."""


class DeviceOutputs:
    """Results of an asynchronous device."""

    def __init__(self, inputs: DeviceInputs, ring: FetchRing) -> None:
        self._inputs = inputs
        self._ring = ring

    @torch.inference_mode()
    def deliver(
        self,
        plan: SchedulerOutput,
        batch: InputBatch,
        token_ids_S: torch.Tensor,
        reports: StepReports,
    ) -> Handle[ModelRunnerOutput]:
        """Append the tokens to their rows on the device, and return a handle to the result."""
        own_S = token_ids_S.to(torch.int32)  # a copy: the memory of the tokens is reused
        if batch.sampling_rows and reports.pooled is None:
            self._inputs.append(batch, own_S)
        finish = partial(_finish, plan, reports)
        return self._ring.fetch((own_S, *reports.tensors()), finish)

    def settle(self) -> None:
        """Wait for outstanding results."""
        self._ring.settle()


def _finish(
    plan: SchedulerOutput, reports: StepReports, tensors: Sequence[torch.Tensor]
) -> ModelRunnerOutput:
    """Return the result. tensors: the int32 tokens and the tensors of the reports, on the host."""
    if reports.pooled is not None:
        return _pooled_output(plan, reports, tensors[1:])
    token_ids = array("i", np.ascontiguousarray(tensors[0].numpy()).tobytes())
    return _output(plan, token_ids, reports, tensors[1:])


def _pooled_output(
    plan: SchedulerOutput, reports: StepReports, tensors: Sequence[torch.Tensor]
) -> ModelRunnerOutput:
    """Return the result of a pooling model. tensors: the pooled results, on the host."""
    results = {
        run: pooled_result(tensor)
        for run, tensor in zip(reports.pooled or {}, tensors, strict=True)
    }
    return ModelRunnerOutput(
        step_id=plan.step_id,
        num_sampled=array("B", bytes(len(plan.rows))),
        token_ids=array("i"),
        pooled={run: result for run, result in results.items() if result is not None},
        errors={run: _NOT_FINITE for run, result in results.items() if result is None},
    )


def _output(
    plan: SchedulerOutput,
    token_ids: array[int],
    reports: StepReports,
    tensors: Sequence[torch.Tensor],
) -> ModelRunnerOutput:
    logprobs, prompt_logprobs = reports.columns(tensors)
    return ModelRunnerOutput(
        step_id=plan.step_id,
        num_sampled=plan.samples,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        errors=reports.errors,
    )
