"""Log-probabilities of tokens under unprocessed logits, as columns.

What is reported is what the model says: no mask, penalty or temperature is in it. Knows nothing
of how the tokens were chosen.
Legend: P positions, V vocabulary, K best tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from dovetail.result import LogprobColumns
from dovetail_torch.sampling.blocks import slabs
from dovetail_torch.sampling.drawing import exponentiate
from dovetail_torch.sampling.truncation import rank


@dataclass(slots=True, kw_only=True)
class Measured:
    """Per position: ids and log-probabilities, target first, then the best; and target's rank."""

    ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


def measure(logits_PV: torch.Tensor, target_ids_P: torch.Tensor, num_logprobs: int) -> Measured:
    """Measure the targets and the best `num_logprobs` tokens (at most V) of each position.

    Logits in any float dtype, only read; log-probabilities in float32. Waits for the device.
    """
    measured, start = Measured(), 0
    for slab in slabs(logits_PV) if len(logits_PV) else ():
        _measure_slab(slab, target_ids_P[start : start + len(slab)], num_logprobs, measured)
        start += len(slab)
    return measured


def _measure_slab(
    logits_PV: torch.Tensor, target_ids_P: torch.Tensor, num_logprobs: int, into: Measured
) -> None:
    logits_PV = logits_PV.float()
    target_P1 = target_ids_P.unsqueeze(1)
    chosen_P1 = logits_PV.gather(1, target_P1)
    values, ids = chosen_P1, target_P1
    if num_logprobs:
        best_PK, ids_PK = rank(logits_PV, min(num_logprobs, logits_PV.shape[1]))
        values, ids = torch.cat((chosen_P1, best_PK), 1), torch.cat((target_P1, ids_PK), 1)
    best_P1 = logits_PV.amax(-1, keepdim=True)
    mass_P1 = exponentiate(logits_PV.clone()).sum(-1, keepdim=True)
    into.ids += ids.tolist()
    into.logprobs += (values - best_P1 - mass_P1.log()).tolist()
    into.ranks += (logits_PV >= chosen_P1).sum(-1).tolist()


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
    """Return the columns of successive positions of one request.

    logits_PV: any float dtype, unprocessed, only read. target_ids_P: int64, the token that stands
    at each position. num_logprobs: how many of the best to report beside it; at most V are.
    """
    measured = measure(logits_PV, target_ids_P, num_logprobs)
    return to_columns(measured.ids, measured.logprobs, measured.ranks)


def gather_row_logprobs(
    logits_PV: torch.Tensor, target_ids_P: torch.Tensor, num_logprobs: Sequence[int]
) -> dict[int, LogprobColumns]:
    """Return the columns of one position for each row of a batch that wants them, by its place.

    num_logprobs: for every row of the batch, -1 for those that want none and are not among the P.
    """
    found = measure(logits_PV, target_ids_P, max(num_logprobs))
    wanted = [(place, num + 1) for place, num in enumerate(num_logprobs) if num >= 0]
    return {
        place: to_columns([found.ids[i][:num]], [found.logprobs[i][:num]], [found.ranks[i]])
        for i, (place, num) in enumerate(wanted)
    }
