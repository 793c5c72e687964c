"""The attention kernel, and the kernel that combines the splits of an item.

The attention kernel has two tile shapes. A tile contains the query heads that share a key-value
head, for one or a few tokens of a request (short items) or for many (long items), and iterates once
over the positions that its tokens see. If there are few tiles, each is cut along its positions into
splits, which `combine` merges. The softmax is computed online, in float32 and powers of two
(Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135; splits: Dao et
al. 2023, Flash-Decoding).

Operands of matrix products are first converted to COMPUTE. On a GPU, COMPUTE is a dtype of its
matrix units: the model's, or float16 for fp8 caches, because fp8 is converted to it in one
instruction. Queries and scales of values are clamped to the range of float16. In the interpreter,
which has no bfloat16 arithmetic, COMPUTE is float32. A program reads only memory of its request.
The cache layout is that of cache_kernel.py. This module does not depend on torch; layer.py launches
the kernels.

Shape legend: T tokens of the step, H query heads, D head size; within a program M rows of queries
(tokens times heads), P positions, S splits, C splits of a chunk.
"""

# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton

import triton
import triton.language as tl

from dovetail_attn_triton.cache_kernel import FP8_MAX
from dovetail_attn_triton.work_kernels import item_of, reach_of, span_of

LOG2_E = tl.constexpr(1.4426950408889634)
FP16_MAX = tl.constexpr(65504.0)

# Arguments that change from step to step must not cause a compilation: small integers, and index
# tensors of any alignment.
_STEP_SIZES = ["table_stride", "num_splits", "least_span", "item_tokens"]
_STEP_TENSORS = ["query_start_ptr", "seq_lens_ptr", "table_ptr", "work_ptr"]


@triton.jit
def _advance(
    q_MD,
    acc_MD,
    max_M,
    sum_M,
    begin,
    end,
    oldest,
    positions_M,
    cache_ptr,
    scales_ptr,
    table_ptr,
    head,
    block_stride,
    scale_stride,
    factor,
    cap,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    COMPUTE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to positions [begin, end), tile by tile.

    MASKED: whether some positions are hidden from some rows.

    oldest: the first position that the first row of queries sees.
    """
    d_D = tl.arange(0, PADDED_SIZE)
    n_P = tl.arange(0, TILE)
    value_offset = NUM_HEADS * BLOCK_SIZE * HEAD_SIZE
    value_scale_offset = NUM_HEADS * BLOCK_SIZE
    for tile in range(begin, end, TILE):
        positions_P = tile + n_P
        if MASKED:
            is_here_P = positions_P < end
            blocks_P = tl.load(table_ptr + positions_P // BLOCK_SIZE, mask=is_here_P, other=0)
        else:
            blocks_P = tl.load(table_ptr + positions_P // BLOCK_SIZE)
        blocks_P = blocks_P.to(tl.int64)
        places_P = head * BLOCK_SIZE + positions_P % BLOCK_SIZE
        keys_PD = (cache_ptr + blocks_P * block_stride + places_P * HEAD_SIZE)[:, None] + d_D[None]
        if MASKED:
            if WINDOW > 0:  # blocks before the first row's window may belong to other requests
                is_here_P = is_here_P & (positions_P > oldest - WINDOW)
            mask_PD = is_here_P[:, None] & (d_D < HEAD_SIZE)[None]
            k_PD = tl.load(keys_PD, mask=mask_PD, other=0.0)
            v_PD = tl.load(keys_PD + value_offset, mask=mask_PD, other=0.0)
        elif PADDED_SIZE != HEAD_SIZE:
            k_PD = tl.load(keys_PD, mask=(d_D < HEAD_SIZE)[None], other=0.0)
            v_PD = tl.load(keys_PD + value_offset, mask=(d_D < HEAD_SIZE)[None], other=0.0)
        else:
            k_PD = tl.load(keys_PD)
            v_PD = tl.load(keys_PD + value_offset)
        scores_MP = tl.dot(q_MD, tl.trans(k_PD.to(COMPUTE)), input_precision="ieee") * factor
        if scales_ptr is not None:
            scale_ptrs_P = scales_ptr + blocks_P * scale_stride + places_P
            if MASKED:
                k_scale_P = tl.load(scale_ptrs_P, mask=is_here_P, other=0.0)
                v_scale_P = tl.load(scale_ptrs_P + value_scale_offset, mask=is_here_P, other=0.0)
            else:
                k_scale_P = tl.load(scale_ptrs_P)
                v_scale_P = tl.load(scale_ptrs_P + value_scale_offset)
            scores_MP *= k_scale_P[None]
        if cap is not None:
            # c · tanh(x), as 1 - 2 / (e^2x + 1): `factor` includes the 2 and the factor log2(e).
            scores_MP = cap * (1.0 - 2.0 / (tl.exp2(scores_MP) + 1.0))
        if MASKED:
            seen_MP = positions_P[None] <= positions_M[:, None]
            if WINDOW > 0:
                seen_MP = seen_MP & (positions_P[None] > positions_M[:, None] - WINDOW)
            scores_MP = tl.where(seen_MP & is_here_P[None], scores_MP, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MP, 1))
        # Any finite number is correct for a row that has not seen a position yet.
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        fade_M = tl.exp2(max_M - base_M)
        p_MP = tl.exp2(scores_MP - base_M[:, None])
        sum_M = sum_M * fade_M + tl.sum(p_MP, 1)
        if scales_ptr is not None:
            # Keeps the product in the range of float16.
            p_MP *= tl.minimum(v_scale_P * FP8_MAX, FP16_MAX)[None]
        acc_MD = acc_MD * fade_M[:, None]
        acc_MD = tl.dot(p_MP.to(COMPUTE), v_PD.to(COMPUTE), acc_MD, input_precision="ieee")
        max_M = new_max_M
    return acc_MD, max_M, sum_M


@triton.jit(do_not_specialize=_STEP_SIZES, do_not_specialize_on_alignment=_STEP_TENSORS)
def attend(
    q_ptr,
    cache_ptr,
    scales_ptr,  # None: tokens have no scales
    layer_scales_ptr,  # None: the layer has no scales; else float32: of keys, of values
    out_ptr,
    parts_ptr,  # None: nothing is split
    sinks_ptr,  # None: no sinks
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    work_ptr,  # None: each run is an item
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    scale_stride,
    table_stride,
    num_splits,
    least_span,
    item_tokens,
    factor,
    cap,  # None: no soft cap
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attend with one item's tokens and one key-value head's queries; grid (items, heads, splits).

    Row m is query head m % GROUP of token m // GROUP. An item without splits is written to `out`. A
    split writes D weighted values and a logarithm per row to `parts`, float32: [items, item_tokens,
    H, num_splits, D], then [items, item_tokens, H, num_splits].
    """
    item = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = ROWS // GROUP
    run, first, start, query_len, context_len = item_of(
        query_start_ptr, seq_lens_ptr, work_ptr, item
    )
    begin, end = reach_of(first, query_len, context_len, TOKENS, WINDOW, TILE)
    if parts_ptr is not None:
        span = span_of(begin, end, num_splits, least_span, TILE)
        is_split = end - begin > span
        begin += split * span
        end = tl.minimum(end, begin + span)
    if (first >= query_len) | (begin >= end):
        return

    if layer_scales_ptr is not None:
        factor *= tl.load(layer_scales_ptr)
    m_M = tl.arange(0, ROWS)
    d_D = tl.arange(0, PADDED_SIZE)
    # Unused rows repeat the last token, so that they see the same positions.
    tokens_M = tl.minimum(first + m_M // GROUP, query_len - 1)
    heads_M = head * GROUP + m_M % GROUP
    is_row_M = (m_M // GROUP < TOKENS) & (first + m_M // GROUP < query_len)
    mask_MD = is_row_M[:, None] & (d_D < HEAD_SIZE)[None]
    places_M = (start + tokens_M).to(tl.int64)
    q_ptrs_M = q_ptr + places_M * q_token_stride + heads_M * q_head_stride
    q_MD = tl.load(q_ptrs_M[:, None] + d_D[None], mask=mask_MD, other=0.0)
    if cache_ptr.dtype.element_ty.is_fp8():  # NaN stays NaN
        q_MD = q_MD.to(tl.float32)
        q_MD = tl.where(q_MD > FP16_MAX, FP16_MAX, tl.where(q_MD < -FP16_MAX, -FP16_MAX, q_MD))
    q_MD = q_MD.to(COMPUTE)

    acc_MD = tl.zeros((ROWS, PADDED_SIZE), dtype=tl.float32)
    max_M = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros((ROWS,), dtype=tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102  # the outer condition is known at compile time
        if split == 0:
            sinks_M = tl.load(sinks_ptr + heads_M, mask=is_row_M, other=0.0)
            max_M = sinks_M.to(tl.float32) * LOG2_E
            sum_M += 1.0
    positions_M = context_len + tokens_M
    table_ptr += run.to(tl.int64) * table_stride
    oldest = context_len + first
    middle = begin
    if WINDOW == 0:  # all rows see all positions up to that of the first row
        middle = tl.maximum(begin, tl.minimum(end, oldest + 1) // TILE * TILE)
        acc_MD, max_M, sum_M = _advance(
            q_MD, acc_MD, max_M, sum_M, begin, middle, oldest, positions_M,
            cache_ptr, scales_ptr, table_ptr, head, block_stride, scale_stride, factor, cap,
            NUM_HEADS, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, TILE, WINDOW, COMPUTE, False,
        )  # fmt: skip
    acc_MD, max_M, sum_M = _advance(
        q_MD, acc_MD, max_M, sum_M, middle, end, oldest, positions_M,
        cache_ptr, scales_ptr, table_ptr, head, block_stride, scale_stride, factor, cap,
        NUM_HEADS, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, TILE, WINDOW, COMPUTE, True,
    )  # fmt: skip

    # If an early token sees no position of a split, its result is 0 and its logarithm -inf.
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    result_MD = acc_MD / sum_M[:, None]
    if scales_ptr is not None:
        result_MD = result_MD / FP8_MAX
    if layer_scales_ptr is not None:
        result_MD *= tl.load(layer_scales_ptr + 1)
    if parts_ptr is not None:
        rows_M = (item * item_tokens + m_M // GROUP).to(tl.int64) * (NUM_HEADS * GROUP) + heads_M
        rows_M = rows_M * num_splits + split
        num_rows = tl.num_programs(0).to(tl.int64) * item_tokens * (NUM_HEADS * GROUP)
        parts_M = parts_ptr + rows_M * HEAD_SIZE
        tl.store(parts_M[:, None] + d_D[None], result_MD, mask=mask_MD & is_split)
        logs_ptr = parts_ptr + num_rows * num_splits * HEAD_SIZE
        tl.store(logs_ptr + rows_M, max_M + tl.log2(sum_M), mask=is_row_M & is_split)
        mask_MD = mask_MD & (is_split == 0)
    out_M = out_ptr + places_M * out_token_stride + heads_M * out_head_stride
    result_MD = result_MD.to(out_ptr.dtype.element_ty)
    tl.store(out_M[:, None] + d_D[None], result_MD, mask=mask_MD)


@triton.jit(do_not_specialize=_STEP_SIZES, do_not_specialize_on_alignment=_STEP_TENSORS)
def combine(
    parts_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    work_ptr,
    out_token_stride,
    out_head_stride,
    num_splits,
    least_span,
    item_tokens,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Combine the splits of one token and query head; grid (items, item_tokens, H)."""
    item = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    _run, first, start, query_len, context_len = item_of(
        query_start_ptr, seq_lens_ptr, work_ptr, item
    )
    begin, end = reach_of(first, query_len, context_len, ROWS // GROUP, WINDOW, TILE)
    span = span_of(begin, end, num_splits, least_span, TILE)
    if (first + token >= query_len) | (end - begin <= span):
        return
    count = (end - begin + span - 1) // span
    row = (item * item_tokens + token).to(tl.int64) * (NUM_HEADS * GROUP) + head
    num_rows = tl.num_programs(0).to(tl.int64) * item_tokens * (NUM_HEADS * GROUP)
    logs_ptr = parts_ptr + num_rows * num_splits * HEAD_SIZE + row * num_splits
    parts_ptr += row * num_splits * HEAD_SIZE
    s_S = tl.arange(0, MAX_SPLITS)
    logs_S = tl.load(logs_ptr + s_S, mask=s_S < count, other=float("-inf"))
    greatest = tl.max(logs_S)
    total = tl.sum(tl.exp2(logs_S - greatest))
    d_D = tl.arange(0, PADDED_SIZE)
    acc_D = tl.zeros((PADDED_SIZE,), dtype=tl.float32)
    for chunk in range(0, count, CHUNK):
        s_C = chunk + tl.arange(0, CHUNK)
        logs_C = tl.load(logs_ptr + s_C, mask=s_C < count, other=float("-inf"))
        mask_CD = (s_C < count)[:, None] & (d_D < HEAD_SIZE)[None]
        part_CD = tl.load(parts_ptr + s_C[:, None] * HEAD_SIZE + d_D[None], mask=mask_CD, other=0.0)
        acc_D += tl.sum(part_CD * tl.exp2(logs_C - greatest)[:, None], 0)
    out_ptr += (start + first + token).to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out_ptr + d_D, (acc_D / total).to(out_ptr.dtype.element_ty), mask=d_D < HEAD_SIZE)
