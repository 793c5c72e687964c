"""Log-probabilities of a step on the device, before they are converted to columns.

This module does not depend on how they are copied to the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dovetail.result import LogprobColumns, PooledTensor
from dovetail_torch.sampling.logprobs import Measured, RowReport, to_columns

Columns = dict[int, LogprobColumns]

_NUM_TENSORS = 3
"""Number of tensors of the class `Measured`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReports:
    """The log-probabilities that the requests of a step need.

    sampled: log-probabilities of the sampled tokens, or None. runs: int64; positions in the plan
    of the requests that sample. The other fields have these positions as keys. prompts:
    log-probabilities of prompt tokens. errors: reasons why requests cannot continue. pooled: pooled
    results, float32, if the model pools; then no request has tokens.
    """

    runs: np.ndarray
    sampled: RowReport | None = None
    prompts: Mapping[int, Measured] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    pooled: Mapping[int, torch.Tensor] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that must be copied to the host. Contiguous."""
        measured = [] if self.sampled is None else [self.sampled.measured]
        measured += self.prompts.values()
        tensors = [tensor.contiguous() for item in measured for tensor in item.tensors]
        tensors += [tensor.contiguous() for tensor in (self.pooled or {}).values()]
        return tensors

    def columns(self, tensors: Sequence[torch.Tensor]) -> tuple[Columns, Columns]:
        """Return the columns of sampled tokens and of prompts, by position in the plan.

        The tensors are on the host.
        """
        logprobs: Columns = {}
        if self.sampled is not None:
            own, tensors = tensors[:_NUM_TENSORS], tensors[_NUM_TENSORS:]
            by_index = self.sampled.columns(own)
            logprobs = {int(self.runs[index]): columns for index, columns in by_index.items()}
        prompt_logprobs = {}
        for index, run in enumerate(self.prompts):
            own = tensors[_NUM_TENSORS * index : _NUM_TENSORS * (index + 1)]
            prompt_logprobs[run] = to_columns(*(tensor.tolist() for tensor in own))
        return logprobs, prompt_logprobs


def pooled_result(tensor: torch.Tensor) -> PooledTensor | None:
    """Return the result in `tensor`, which is on the host, or None if a value is not finite."""
    if not tensor.isfinite().all():
        return None
    values = array("f", tensor.numpy().tobytes())
    return PooledTensor(shape=tuple(tensor.shape), values=values)


NO_REPORTS = StepReports(runs=np.zeros(0, np.int64))
