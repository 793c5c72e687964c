# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Sample tokens: select the kept column with the greatest sum of logit and Gumbel noise.

First min-p, top-k and top-p are applied (`cuts.py`). The noise is a function of the row's seed, the
position and the column, and is computed where it is used. So rows are independent, a
row may be processed in parts, and there is no random state. Source: Gumbel 1954; Maddison, Tarlow
and Minka 2014, arXiv:1411.0030; the generator: Salmon et al. 2011 (Philox4x32-10).
Dimensions: R rows, V vocabulary, S parts of a row.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import DrawColumns
from dovetail_ops_triton.kernels.best_columns import (
    MAX_PARTS,
    NUM_WARPS,
    TILE,
    best_sort_key,
    join_parts_kernel,
    share_out,
    store_sort_key,
)
from dovetail_ops_triton.kernels.cuts import cuts_kernel
from dovetail_ops_triton.kernels.order import (
    LOWEST,
    MINIMUM,
    column_of,
    image_in,
    image_of,
    number_of,
    sort_key_of,
)
from dovetail_ops_triton.kernels.row_layout import row_layout

_LOG2E = tl.constexpr(1.4426950408889634)
CUT_BLOCK = 4096
CUT_WARPS = 16
CANDIDATES = 2048
"""Maximum number of candidates of a row, with 8 bytes each: see `cuts.py`."""


# Columns with one number per row share a buffer, so the alignment of their addresses varies.
_COLUMNS = [
    "temperature_ptr",
    "seeds_ptr",
    "positions_ptr",
    "cuts_ptr",
    "counts_ptr",
    "candidates_ptr",
    "ids_ptr",
    "parts_ptr",
]


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=_COLUMNS)
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    cuts_ptr,
    counts_ptr,
    candidates_ptr,
    ids_ptr,
    parts_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Sample from `num_tiles` tiles of a row. Store the token, or the sort key of a part.

    Here sort keys order the sums of logit and noise. If the row has candidates, its first program
    samples from them, and the others do nothing. TILE: number of columns of a tile; the noise of a
    column depends on it.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * num_tiles * TILE
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        cut = tl.load(cuts_ptr + row)
        scale = _LOG2E / temperature
        num_candidates = tl.load(counts_ptr + row).to(tl.int32)
        if num_candidates == 0:
            sort_key = _drawn_sort_key(
                row_ptr, first, num_tiles, vocab_size, scale, seed, position, cut, TILE
            )
        else:
            sort_key = tl.full([], LOWEST, tl.int64)
            if first == 0:
                candidates_ptr += row * CANDIDATES
                sort_key = _drawn_candidate(
                    candidates_ptr, num_candidates, scale, seed, position, cut, TILE, CANDIDATES
                )
    else:
        sort_key = best_sort_key(row_ptr, first, num_tiles, vocab_size, TILE)
    store_sort_key(sort_key, row, ids_ptr, parts_ptr, IS_WHOLE)


@triton.jit
def _drawn_sort_key(
    row_ptr, first, num_tiles, vocab_size, scale, seed, position, cut, TILE: tl.constexpr
):
    """Sample a token from the tiles of a row that begin at column `first`. Return its sort key."""
    QUARTER: tl.constexpr = TILE // 4
    lanes = tl.arange(0, QUARTER)
    best = tl.full([QUARTER], MINIMUM, tl.int32)
    best_columns = tl.zeros([QUARTER], tl.int32)
    for tile in range(0, num_tiles):
        start = first + tile * TILE
        # One counter yields four numbers, for four columns that are a quarter of the tile
        # apart.
        words = noise_words(seed, position, start // 4 + lanes)
        for i in tl.static_range(4):
            columns = start + i * QUARTER + lanes
            inside = columns < vocab_size
            x = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            stays = inside & (sort_key_of(image_of(x), columns) >= cut)
            image = tl.where(stays, image_of(x * scale + gumbel(words[i])), MINIMUM)
            best_columns = tl.where(image > best, columns, best_columns)
            best = tl.maximum(best, image)
    return tl.max(sort_key_of(best, best_columns), axis=0)


@triton.jit
def _drawn_candidate(
    candidates_ptr,
    num_candidates,
    scale,
    seed,
    position,
    cut,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Sample from the candidates of a row. The result is the same as from the whole row."""
    QUARTER: tl.constexpr = TILE // 4
    lanes = tl.arange(0, CANDIDATES)
    sort_keys = tl.load(candidates_ptr + lanes, mask=lanes < num_candidates, other=LOWEST)
    columns = column_of(sort_keys).to(tl.int32)
    words = noise_words(seed, position, columns // TILE * QUARTER + columns % QUARTER)
    quarter = columns % TILE // QUARTER
    word = tl.where(quarter < 2, words[0], words[2])
    word = tl.where(quarter % 2 == 0, word, tl.where(quarter < 2, words[1], words[3]))
    sums = number_of(image_in(sort_keys)) * scale + gumbel(word)
    stays = (lanes < num_candidates) & (sort_keys >= cut)
    image = tl.where(stays, image_of(sums), MINIMUM)
    return tl.max(sort_key_of(image, columns), axis=0)


@triton.jit
def noise_words(seed, position, counters):
    """Return four random uint32 per counter, from a row's seed and position, int64."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    return tl.philox(seed, counters.to(tl.uint32), low, high, low * 0)


@triton.jit
def gumbel(words):
    """Return Gumbel noise over log(2) from uniform uint32: -log2(-ln(1 - u)).

    u keeps its relative precision near 0, which gives the greatest noise. So the smallest
    probability of a token is limited by the step of 2^-32 between two words, not by float32's
    resolution near 1.
    """
    u = words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    u = tl.minimum(u, 1.0 - 5.9604644775390625e-08)
    small = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log2(tl.where(u < 0.04, small, -tl.log(1.0 - u)))


def draw_columns(logits_RV: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
    """Return a sampled token per row, int64 [R]. Only reads the logits.

    Makes one allocation, which starts with the result. One launch applies top-k, top-p and min-p, a
    second launch samples, and a third launch combines the parts of rows if rows are split.
    """
    num_rows, vocab_size = logits_RV.shape
    num_parts, num_tiles = share_out(num_rows, vocab_size)
    sizes = [num_rows * size for size in (1, 1, 1, num_parts, CANDIDATES)]
    output = torch.empty(sum(sizes), dtype=torch.int64, device=logits_RV.device)
    ids_R, cuts_R, counts_R, parts_RS, candidates_RC = output.split(sizes)
    if not num_rows:
        return ids_R
    rows = row_layout(logits_RV)
    cuts_kernel[(num_rows,)](
        rows.tensor,
        columns.temperature_R,
        columns.top_k_R,
        columns.top_p_R,
        columns.min_p_R,
        cuts_R,
        counts_R,
        candidates_RC,
        rows.outer_stride,
        vocab_size,
        deviations_of(vocab_size),
        BLOCK=min(CUT_BLOCK, triton.next_power_of_2(vocab_size)),
        CANDIDATES=CANDIDATES,
        num_warps=CUT_WARPS,
    )
    draw_kernel[(num_rows, num_parts)](
        rows.tensor,
        columns.temperature_R,
        columns.seeds_R,
        columns.positions_R,
        cuts_R,
        counts_R,
        candidates_RC,
        ids_R,
        parts_RS,
        rows.outer_stride,
        vocab_size,
        num_tiles,
        TILE=TILE,
        CANDIDATES=CANDIDATES,
        IS_WHOLE=num_parts == 1,
        num_warps=NUM_WARPS,
    )
    if num_parts > 1:
        join_parts_kernel[(num_rows,)](parts_RS, ids_R, num_parts, PARTS=MAX_PARTS, num_warps=1)
    return ids_R


@cache
def deviations_of(vocab_size: int) -> float:
    """Return how many standard deviations candidates are above the mean.

    If logits are normally distributed, `CANDIDATES` / 2 of them are above this distance.
    """
    return NormalDist().inv_cdf(1 - min(0.5, CANDIDATES / 2 / vocab_size))
