"""Rounds weights to float8_e4m3fn, with one scale per output feature or per block.

scale = max(|w|) / 448, where 448 is the largest float8_e4m3fn; code = w / scale, rounded to nearest
even. All is computed in float32. The value of a weight is code · scale, cast to the layer's dtype.
Source: Micikevicius et al. 2022, arXiv:2209.05433.
Dimensions: O output features, I input features, R rows, P x Q blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from dovetail.interfaces.model import RankGroup

MAX_E4M3 = 448.0
MAX_CHUNK_VALUES = 1 << 22
"""Number of values that are in float32 at the same time."""
_TINY = torch.finfo(torch.float32).tiny
"""The smallest scale, so that rows of zeros have finite codes."""


def round_weight(
    weight_OI: torch.Tensor, block: int, ranks: RankGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, float8_e4m3fn [O, I], and the scales of each row, float32 [O, Q].

    block: rows and columns of a block, or 0 for one scale per row (Q = 1). ranks: the ranks that
    shard the input features of a row, which then have the same scale. All of them must call this
    function.
    """
    peaks_PQ = torch.cat([_peaks(weight_OI[rows], block) for rows in _chunks(weight_OI, block)])
    if ranks is not None:
        peaks_PQ = ranks.all_gather(peaks_PQ).amax(1, keepdim=True)
    scales_PQ = (peaks_PQ / MAX_E4M3).clamp_min(_TINY)
    scales_OQ = scales_PQ.repeat_interleave(block or 1, dim=0)[: len(weight_OI)].contiguous()
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    for rows in _chunks(weight_OI, block):
        quotients_RI = weight_OI[rows].float() / _per_column(scales_OQ[rows], weight_OI, block)
        codes_OI[rows] = quotients_RI.clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    return codes_OI, scales_OQ


def decode(
    codes_OI: torch.Tensor, scales_OQ: torch.Tensor, block: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return code · scale, [O, I], computed in float32 and cast to `dtype`."""
    return (codes_OI.float() * _per_column(scales_OQ, codes_OI, block)).to(dtype)


def decode_to(
    target_OI: torch.Tensor, codes_OI: torch.Tensor, scales_OQ: torch.Tensor, block: int
) -> None:
    """Write the values to `target_OI`, some rows at a time."""
    for rows in _chunks(codes_OI, block):
        target_OI[rows] = decode(codes_OI[rows], scales_OQ[rows], block, target_OI.dtype)


def _chunks(weight_OI: torch.Tensor, block: int) -> Iterator[slice]:
    num_rows, num_columns = weight_OI.shape
    multiple = block or 1
    step = max(1, MAX_CHUNK_VALUES // (num_columns * multiple)) * multiple
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _peaks(rows_RI: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest magnitude of each row or block, float32 [P, Q]."""
    if not block:
        return rows_RI.float().abs().amax(1, keepdim=True)
    num_rows, num_columns = rows_RI.shape
    padding = (0, -num_columns % block, 0, -num_rows % block)
    padded = functional.pad(rows_RI.float(), padding)
    return padded.abs().unflatten(1, (-1, block)).unflatten(0, (-1, block)).amax((1, 3))


def _per_column(scales_RQ: torch.Tensor, weight_OI: torch.Tensor, block: int) -> torch.Tensor:
    """Return the scale of each column, [R, I], or [R, 1] for one scale per row."""
    if not block:
        return scales_RQ
    return scales_RQ.repeat_interleave(block, dim=1)[:, : weight_OI.shape[1]]
