"""The path of a step's inputs to the device and of its tokens to the host, selected at startup.

If the host computes, inputs are gathered in host memory, and a step may continue the last one. For
an asynchronous device, columns are sent to it, and results are handles. This module does not depend
on the model or attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dovetail.plan import SchedulerOutput
from dovetail_torch.graphs.step_graphs import StepGraphs, make_step_graphs
from dovetail_torch.lazy_memory import host_view
from dovetail_torch.runner.continuation import Continuable, Continuation, NoContinuation
from dovetail_torch.runner.device_inputs import DeviceInputs
from dovetail_torch.runner.device_rows import DeviceRows
from dovetail_torch.runner.input_batch import InputBatch, InputGatherer, StepShape
from dovetail_torch.runner.kv_cache import AttentionState
from dovetail_torch.runner.late_output import FetchRing
from dovetail_torch.runner.loaded_model import LoadedModel
from dovetail_torch.runner.request_rows import RequestRows
from dovetail_torch.runner.staging import Staging
from dovetail_torch.runner.step_limits import StepLimits
from dovetail_torch.runner.step_outputs import DeviceOutputs, HostOutputs, StepOutputs
from dovetail_torch.sampling import Sampler

_USUAL_LOGPROBS = 20
_LOGPROB_BYTES = 12


class StepInputs(Protocol):
    """Applies plans to the rows and computes the input tensors of a step."""

    def take(self, plan: SchedulerOutput) -> InputBatch | None:
        """Apply the plan to the rows and return the step's tensors. None for an empty plan."""


@dataclass(frozen=True, kw_only=True)
class StepPath:
    """The device-dependent parts of a runner: inputs, outputs, rows and continuation.

    graphs: the graphs of an asynchronous device, or None.
    """

    rows: RequestRows | DeviceRows
    inputs: StepInputs
    outputs: StepOutputs
    continuation: Continuable
    graphs: StepGraphs | None = None


def host_path(loaded: LoadedModel, attention: AttentionState) -> StepPath:
    """Return the path of a synchronous device."""
    limits, block_sizes = loaded.limits, attention.block_sizes
    rows = RequestRows(
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_sizes=block_sizes,
        device=limits.device,
    )
    inputs = InputGatherer(rows, _shape(loaded, attention), loaded.tables)
    continuation: Continuable = NoContinuation()
    if attention.supports_advance and host_view(rows.token_ids_RL) is not None:
        builders = [builder for builder, _ in attention.builders]
        continuation = Continuation(rows, inputs, builders)
    return StepPath(
        rows=rows,
        inputs=inputs,
        outputs=HostOutputs(inputs, continuation),
        continuation=continuation,
    )


def _shape(loaded: LoadedModel, attention: AttentionState) -> StepShape:
    return StepShape(
        block_sizes=attention.block_sizes,
        max_num_tokens=loaded.limits.max_num_batched_tokens,
        thresholds=attention.reorder_thresholds,
    )


def device_path(
    loaded: LoadedModel, attention: AttentionState, staging: Staging, sampler: Sampler
) -> StepPath:
    """Return the path of an asynchronous device. staging: sends arrays to it.

    sampler: returns the numbers that sampling a step needs on the device.
    """
    limits, block_sizes = loaded.limits, attention.block_sizes
    rows = DeviceRows(
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_sizes=block_sizes,
        device=limits.device,
    )
    inputs = DeviceInputs(
        rows,
        staging,
        _shape(loaded, attention),
        prepare_inputs=loaded.device_parts.prepare_inputs,
        sampling_numbers=sampler.host_numbers,
        tables=loaded.tables,
    )
    ring = FetchRing(staging.asynchronous, _result_bytes(limits))
    return StepPath(
        rows=rows,
        inputs=inputs,
        outputs=DeviceOutputs(inputs, ring),
        continuation=NoContinuation(),
        graphs=make_step_graphs(loaded, attention, inputs),
    )


def _result_bytes(limits: StepLimits) -> int:
    """Return the bytes of a step's result if every token has the usual log-probabilities."""
    num_positions = limits.max_num_batched_tokens + limits.max_num_seqs
    return num_positions * (_USUAL_LOGPROBS + 2) * _LOGPROB_BYTES
