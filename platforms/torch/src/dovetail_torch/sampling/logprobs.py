"""Log-probabilities of tokens under unprocessed logits, as columns.

Reported values are those of the model, without mask, penalty or temperature. This module does not
depend on how the tokens were chosen. Dimensions: P positions, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dovetail.result import LogprobColumns
from dovetail_torch.sampling.blocks import slabs
from dovetail_torch.sampling.drawing import exponentiate
from dovetail_torch.sampling.truncation import rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Log-probabilities on the device, by position: target token, then the most likely tokens.

    ids_PK: int64. logprobs_PK: float32. ranks_P: int64; ranks of the targets.
    """

    ids_PK: torch.Tensor
    logprobs_PK: torch.Tensor
    ranks_P: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All fields, in the order that `to_columns` expects."""
        return self.ids_PK, self.logprobs_PK, self.ranks_P


def measure(logits_PV: torch.Tensor, target_ids_P: torch.Tensor, num_logprobs: int) -> Measured:
    """Measure the targets and the best `num_logprobs` tokens (at most V) of each position.

    Logits have any float dtype and are only read; log-probabilities are float32. Does not wait.
    """
    start, parts = 0, []
    for slab in slabs(logits_PV):
        targets = target_ids_P[start : start + len(slab)]
        parts.append(_measure_slab(slab, targets, num_logprobs))
        start += len(slab)
    return join_measured(parts)


def join_measured(parts: Sequence[Measured]) -> Measured:
    """Concatenate one or more parts of successive positions. All parts have the same width."""
    if len(parts) == 1:
        return parts[0]
    return Measured(
        ids_PK=torch.cat([part.ids_PK for part in parts]),
        logprobs_PK=torch.cat([part.logprobs_PK for part in parts]),
        ranks_P=torch.cat([part.ranks_P for part in parts]),
    )


def _measure_slab(
    logits_PV: torch.Tensor, target_ids_P: torch.Tensor, num_logprobs: int
) -> Measured:
    logits_PV = logits_PV.float()
    target_P1 = target_ids_P.unsqueeze(1)
    chosen_P1 = logits_PV.gather(1, target_P1)
    values, ids = chosen_P1, target_P1
    if num_logprobs:
        best_PK, ids_PK = rank(logits_PV, min(num_logprobs, logits_PV.shape[1]))
        values, ids = torch.cat((chosen_P1, best_PK), 1), torch.cat((target_P1, ids_PK), 1)
    best_P1 = logits_PV.amax(-1, keepdim=True)
    mass_P1 = exponentiate(logits_PV.clone()).sum(-1, keepdim=True)
    return Measured(
        ids_PK=ids,
        logprobs_PK=values - best_P1 - mass_P1.log(),
        ranks_P=(logits_PV >= chosen_P1).sum(-1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """Log-probabilities that some rows of a batch requested for their sampled tokens.

    num_logprobs: number requested by each row of the batch, -1 for none.
    """

    measured: Measured
    num_logprobs: Sequence[int]

    def columns(self, tensors: Sequence[torch.Tensor]) -> dict[int, LogprobColumns]:
        """Return the columns of each row that requested log-probabilities, by index in the batch.

        tensors: the tensors of `measured`, on the host.
        """
        ids, logprobs, ranks = (tensor.tolist() for tensor in tensors)
        counts = [(index, num + 1) for index, num in enumerate(self.num_logprobs) if num >= 0]
        return {
            index: to_columns([ids[i][:num]], [logprobs[i][:num]], [ranks[i]])
            for i, (index, num) in enumerate(counts)
        }


def to_columns(
    ids: Iterable[Sequence[int]], logprobs: Iterable[Sequence[float]], ranks: Iterable[int]
) -> LogprobColumns:
    """Return the columns of positions measured by `measure`."""
    counts, flat_ids, flat_logprobs = array("i"), array("i"), array("f")
    for ids_here, logprobs_here in zip(ids, logprobs, strict=True):
        counts.append(len(ids_here))
        flat_ids.extend(ids_here)
        flat_logprobs.extend(logprobs_here)
    return LogprobColumns(
        counts=counts, token_ids=flat_ids, logprobs=flat_logprobs, ranks=array("i", ranks)
    )


def gather_logprobs(
    logits_PV: torch.Tensor, target_ids_P: torch.Tensor, num_logprobs: int
) -> LogprobColumns:
    """Return the columns of successive positions of one request. Waits for the device.

    logits_PV: any float dtype, unprocessed, only read. target_ids_P: int64, the token at each
    position. num_logprobs: number of most likely tokens that are also reported; at most V.
    """
    measured = measure(logits_PV, target_ids_P, num_logprobs)
    return to_columns(*(tensor.tolist() for tensor in measured.tensors))
