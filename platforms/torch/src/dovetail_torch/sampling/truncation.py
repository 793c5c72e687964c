"""Truncation of a distribution: min-p, top-k and top-p, and sampling from the remaining tokens.

The order of tokens is canonical: tokens with greater logits first, and lower ids first among equal
logits. So the k most likely tokens, and therefore every sample, do not depend on the number of
candidates. top-k keeps exactly k tokens; top-p then keeps the fewest that reach p of the remaining
mass. This module does not depend on requests: it gets columns of parameters. Dimensions: R rows, V
vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from dovetail_torch.sampling.blocks import block_maxima, block_sums, gather_blocks, slabs
from dovetail_torch.sampling.drawing import DRAW_WIDTH, exponentiate, pick

FIRST_BEST = 64
GROWTH = 16
SMALL_TOP_K = 1024
_SORTED_AT_ONCE = 1 << 23
"""Maximum number of values to sort at once; sorting needs about 60 bytes per value."""


def apply_min_p(logits_RV: torch.Tensor, log_min_p_R1: torch.Tensor) -> None:
    """Set to -inf, in place, tokens less likely than min-p times the best (Nguyen et al. 2024).

    log_min_p_R1: natural logarithm of min-p, -inf for rows without min-p.
    """
    threshold_R1 = logits_RV.amax(-1, keepdim=True) + log_min_p_R1
    logits_RV.masked_fill_(logits_RV < threshold_R1, -torch.inf)


def _order(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that increase with the float32 value and decrease with the column."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 converts -0 to 0
    grows = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (grows.long() << 32) | (0xFFFFFFFF - columns)


def rank(logits_RV: torch.Tensor, num_best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best `num_best` float32 logits and their columns in canonical order, [R, K].

    The k largest logits are in the k blocks with the largest maxima, so only these blocks are read.
    """
    vocab_size = logits_RV.shape[1]
    if num_best * 4 >= vocab_size:
        values_RV, columns_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
        return values_RV[:, :num_best], columns_RV[:, :num_best]
    values, columns = logits_RV, torch.arange(vocab_size, device=logits_RV.device)
    width = 1 << (int((vocab_size / num_best) ** 0.5).bit_length() - 1)
    if width >= 8:
        maxima_RC = block_maxima(logits_RV, width)
        blocks_C = torch.arange(maxima_RC.shape[1], device=logits_RV.device)
        blocks_RK = _order(maxima_RC, blocks_C).topk(num_best, sorted=False).indices
        values, columns = gather_blocks(logits_RV, blocks_RK, width, -torch.inf)
    best_RK = _order(values, columns).topk(num_best).indices
    return values.gather(1, best_RK), columns.expand_as(values).gather(1, best_RK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """top-k and top-p of R rows, as columns.

    top_k_R1: int64, the size of the vocabulary if top-k is disabled. top_p_R1: in the accumulation
    dtype, 1 if top-p is disabled. first: number of most likely tokens that are ranked in the first
    attempt. settled: whether this number is enough for every row.
    """

    top_k_R1: torch.Tensor
    top_p_R1: torch.Tensor
    first: int
    settled: bool

    def part(self, rows: slice) -> Cuts:
        """Return the top-k and top-p of `rows`."""
        return replace(self, top_k_R1=self.top_k_R1[rows], top_p_R1=self.top_p_R1[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Nuclei:
    """The remaining tokens of some rows after top-k and top-p, best first.

    index_R: indices of the rows, int64. columns_RK: most likely tokens of the rows. weights_RK:
    unnormalized probabilities, 0 for dropped tokens. cumulative_RK: running sums of the weights.
    """

    index_R: torch.Tensor
    columns_RK: torch.Tensor
    weights_RK: torch.Tensor
    cumulative_RK: torch.Tensor

    def draw(self, uniform_R1: torch.Tensor) -> torch.Tensor:
        """Sample a token for each row, int64 [R]. `uniform_R1` belongs to these rows."""
        target_R1 = uniform_R1 * self.cumulative_RK[:, -1:]
        return self.columns_RK.gather(1, pick(self.cumulative_RK, target_R1)).squeeze(1)


def cut(logits_RV: torch.Tensor, cuts: Cuts) -> Iterator[Nuclei]:
    """Yield the tokens that top-k and top-p keep, for groups of rows.

    The float32 logits are only read. top-p alone does not limit the number of tokens: if the K most
    likely tokens of a row do not reach the mass, the row is ranked again with more tokens, finally
    with all. Finding those rows waits for the device; it is skipped if top-k limits every row, or
    `first` is the whole vocabulary. Source: Holtzman et al. 2020 (top-p); Fan, Lewis, Dauphin 2018
    (top-k).
    """
    num_rows, vocab_size = logits_RV.shape
    maximum = max(1, _SORTED_AT_ONCE // vocab_size)
    if cuts.first < vocab_size or num_rows <= maximum:
        yield from _cut(logits_RV, cuts)
        return
    for start in range(0, num_rows, maximum):
        rows = slice(start, start + maximum)
        for nuclei in _cut(logits_RV[rows], cuts.part(rows)):
            yield replace(nuclei, index_R=nuclei.index_R + start)


def _cut(logits_RV: torch.Tensor, cuts: Cuts) -> Iterator[Nuclei]:
    index_R = torch.arange(len(logits_RV), device=logits_RV.device)
    total_R1 = cuts.top_p_R1 if cuts.settled else _whole_mass(logits_RV, cuts.top_p_R1.dtype)
    num_best, vocab_size = cuts.first, logits_RV.shape[1]
    top_k_R1, top_p_R1 = cuts.top_k_R1, cuts.top_p_R1
    while True:
        num_best = min(num_best, vocab_size)
        values_RK, columns_RK = rank(logits_RV, num_best)
        weights_RK = exponentiate(values_RK.to(top_p_R1.dtype))
        places_K = torch.arange(num_best, device=logits_RV.device)
        weights_RK.masked_fill_(places_K >= top_k_R1, 0)
        cumulative_RK = weights_RK.cumsum(-1)
        mass_R1 = cumulative_RK[:, -1:]
        if not cuts.settled:
            mass_R1 = torch.where(top_k_R1 < vocab_size, mass_R1, total_R1)
        nuclei = _nuclei(index_R, columns_RK, weights_RK, cumulative_RK, top_p_R1 * mass_R1)
        if cuts.settled or num_best == vocab_size:
            yield nuclei
            return
        enough_R1 = cumulative_RK[:, -1:] >= top_p_R1 * mass_R1
        enough_R = torch.where(top_k_R1 < vocab_size, top_k_R1 <= num_best, enough_R1).squeeze(1)
        if enough_R.all():
            yield nuclei
            return
        yield _select(nuclei, enough_R)
        open_ = (~enough_R).nonzero().squeeze(1)
        index_R, logits_RV = index_R[open_], logits_RV[open_]
        top_k_R1, top_p_R1, total_R1 = top_k_R1[open_], top_p_R1[open_], total_R1[open_]
        num_best *= GROWTH


def _whole_mass(logits_RV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    masses = [
        block_sums(exponentiate(slab.clone()), DRAW_WIDTH).to(dtype).sum(-1, keepdim=True)
        for slab in slabs(logits_RV)
    ]
    return torch.cat(masses)


def _nuclei(
    index_R: torch.Tensor,
    columns_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    cumulative_RK: torch.Tensor,
    enough_R1: torch.Tensor,
) -> Nuclei:
    """Keep the top-1 token, and each further token if those before it do not reach the mass."""
    before_RK = pad(cumulative_RK[:, :-1], (1, 0))
    cut_RK = before_RK >= enough_R1
    cut_RK[:, 0] = False
    weights_RK = weights_RK.masked_fill(cut_RK, 0)
    # The running sums do not change before the first dropped token, and are constant after it.
    kept_R1 = cumulative_RK.masked_fill(cut_RK, 0).amax(-1, keepdim=True)
    return Nuclei(
        index_R=index_R,
        columns_RK=columns_RK,
        weights_RK=weights_RK,
        cumulative_RK=torch.where(cut_RK, kept_R1, cumulative_RK),
    )


def _select(nuclei: Nuclei, keep: torch.Tensor) -> Nuclei:
    return Nuclei(
        index_R=nuclei.index_R[keep],
        columns_RK=nuclei.columns_RK[keep],
        weights_RK=nuclei.weights_RK[keep],
        cumulative_RK=nuclei.cumulative_RK[keep],
    )
