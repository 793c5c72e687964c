"""The work of a step's programs: the items of a mixed step, and the splits of an item.

An item is a tile of the tokens of one request. If all requests are short, each is an item and there
is no list. This module does not depend on torch, heads or the cache.

Shape legend: C requests or tiles of a chunk.
"""

# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["query_start_ptr"])
def list_work(
    query_start_ptr,
    short_ptr,
    long_ptr,
    SHORT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List the step's items, int32 pairs (request, first token). Grid (requests,).

    Requests with up to SHORT tokens are one item of the short list; others have one item of the
    long list for each TILE tokens. The last tokens of a request come first, because they see the
    most positions. Each program counts the items of the requests before its own.
    """
    run = tl.program_id(0)
    num_short = 0
    num_long = 0
    for first in range(0, run, CHUNK):
        others_C = first + tl.arange(0, CHUNK)
        is_before_C = others_C < run
        starts_C = tl.load(query_start_ptr + others_C, mask=is_before_C, other=0)
        ends_C = tl.load(query_start_ptr + others_C + 1, mask=is_before_C, other=0)
        lens_C = ends_C - starts_C
        num_short += tl.sum(((lens_C > 0) & (lens_C <= SHORT)).to(tl.int32))
        num_long += tl.sum(tl.where(lens_C > SHORT, (lens_C + TILE - 1) // TILE, 0))
    query_len = tl.load(query_start_ptr + run + 1) - tl.load(query_start_ptr + run)
    if query_len <= SHORT:
        if query_len > 0:
            tl.store(short_ptr + 2 * num_short, run)
            tl.store(short_ptr + 2 * num_short + 1, 0)
    else:
        num_tiles = (query_len + TILE - 1) // TILE
        for first in range(0, num_tiles, CHUNK):
            tiles_C = first + tl.arange(0, CHUNK)
            is_tile_C = tiles_C < num_tiles
            places_C = long_ptr + 2 * (num_long + num_tiles - 1 - tiles_C)
            tl.store(places_C, tl.zeros_like(tiles_C) + run, mask=is_tile_C)
            tl.store(places_C + 1, tiles_C * TILE, mask=is_tile_C)


@triton.jit
def item_of(query_start_ptr, seq_lens_ptr, work_ptr, item):
    """Return an item's request and first token, and the request's start, length and context.

    Without a list, each request is an item.
    """
    if work_ptr is not None:
        run = tl.load(work_ptr + 2 * item)
        first = tl.load(work_ptr + 2 * item + 1)
    else:
        run = item
        first = item * 0
    start = tl.load(query_start_ptr + run)
    query_len = tl.load(query_start_ptr + run + 1) - start
    context_len = tl.load(seq_lens_ptr + run) - query_len
    return run, first, start, query_len, context_len


@triton.jit
def reach_of(
    first,
    query_len,
    context_len,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the range of positions that an item's tokens see. It begins at a multiple of TILE."""
    end = context_len + tl.minimum(first + TOKENS, query_len)
    begin = end * 0
    if WINDOW > 0:
        begin = tl.maximum(context_len + first - WINDOW + 1, 0) // TILE * TILE
    return begin, end


@triton.jit
def span_of(begin, end, num_splits, least_span, TILE: tl.constexpr):
    """Return the number of positions in each split of an item, a multiple of TILE."""
    share = (end - begin + num_splits - 1) // num_splits
    return tl.maximum(least_span, (share + TILE - 1) // TILE * TILE)
