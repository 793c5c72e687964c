"""The kernels of multi-head latent attention: all heads attend to one vector per token.

The value of a token is the first features of its vector, and only vectors are cached: [N, B, D]. A
program reads a tile of vectors once, for scores and for values. The features are divided at the
largest power of two, FIRST: 512 of 576 features, so that nothing is padded. Items, splits and the
softmax are those of attention_kernels.py; `combine` merges splits. The heads of a token are divided
into blocks, because a program has room for a limited number of results. This module does not depend
on torch; latent_layer.py launches the kernels. Source: DeepSeek-AI 2024, arXiv:2405.04434.

Shape legend: T tokens, D features of a vector, V features of a value, N blocks, B block size;
within a program M rows of queries (tokens times heads), P positions, F the first features and R the
rest.
"""

# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton

import triton
import triton.language as tl

from dovetail_attn_triton.work_kernels import item_of, reach_of, span_of

_STEP_SIZES = ["table_stride", "num_splits", "least_span", "item_tokens"]
_STEP_TENSORS = ["query_start_ptr", "seq_lens_ptr", "table_ptr", "work_ptr"]


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def write_vectors(
    k_ptr,
    cache_ptr,
    slots_ptr,
    num_tokens,
    k_token_stride,
    block_stride,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Write vectors to their slots. Grid (tiles of tokens, tiles of features)."""
    tokens_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d_D = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_token_T = tokens_T < num_tokens
    mask_TD = is_token_T[:, None] & (d_D < HEAD_SIZE)[None]
    slots_T = tl.load(slots_ptr + tokens_T, mask=is_token_T, other=0).to(tl.int64)
    source_T = k_ptr + tokens_T.to(tl.int64) * k_token_stride
    x_TD = tl.load(source_T[:, None] + d_D[None], mask=mask_TD, other=0.0)
    target_T = cache_ptr + slots_T // BLOCK_SIZE * block_stride
    target_T += slots_T % BLOCK_SIZE * HEAD_SIZE
    tl.store(target_T[:, None] + d_D[None], x_TD.to(cache_ptr.dtype.element_ty), mask=mask_TD)


@triton.jit
def _advance(
    q_MF,
    q_MR,
    acc_MF,
    acc_MR,
    max_M,
    sum_M,
    begin,
    end,
    positions_M,
    cache_ptr,
    table_ptr,
    block_stride,
    factor,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to positions [begin, end), tile by tile.

    MASKED: whether some rows do not see some of the positions.
    """
    f_F = tl.arange(0, FIRST)
    r_R = FIRST + tl.arange(0, REST)
    n_P = tl.arange(0, TILE)
    for tile in range(begin, end, TILE):
        positions_P = tile + n_P
        is_here_P = positions_P < end
        if MASKED:
            blocks_P = tl.load(table_ptr + positions_P // BLOCK_SIZE, mask=is_here_P, other=0)
        else:
            blocks_P = tl.load(table_ptr + positions_P // BLOCK_SIZE)
        vectors_P = cache_ptr + blocks_P.to(tl.int64) * block_stride
        vectors_P += positions_P % BLOCK_SIZE * HEAD_SIZE
        if MASKED:
            x_PF = tl.load(vectors_P[:, None] + f_F[None], mask=is_here_P[:, None], other=0.0)
        else:
            x_PF = tl.load(vectors_P[:, None] + f_F[None])
        x_PF = x_PF.to(COMPUTE)
        scores_MP = tl.dot(q_MF, tl.trans(x_PF), input_precision="ieee")
        if HEAD_SIZE > FIRST:
            mask_PR = is_here_P[:, None] & (r_R < HEAD_SIZE)[None]
            x_PR = tl.load(vectors_P[:, None] + r_R[None], mask=mask_PR, other=0.0).to(COMPUTE)
            scores_MP = tl.dot(q_MR, tl.trans(x_PR), scores_MP, input_precision="ieee")
        scores_MP *= factor
        if MASKED:
            seen_MP = (positions_P[None] <= positions_M[:, None]) & is_here_P[None]
            scores_MP = tl.where(seen_MP, scores_MP, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MP, 1))
        # Any finite number is correct for a row that has not seen a position yet.
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        fade_M = tl.exp2(max_M - base_M)
        p_MP = tl.exp2(scores_MP - base_M[:, None])
        sum_M = sum_M * fade_M + tl.sum(p_MP, 1)
        p_MP = p_MP.to(COMPUTE)
        acc_MF = tl.dot(p_MP, x_PF, acc_MF * fade_M[:, None], input_precision="ieee")
        if VALUE_SIZE > FIRST:
            acc_MR = tl.dot(p_MP, x_PR, acc_MR * fade_M[:, None], input_precision="ieee")
        max_M = new_max_M
    return acc_MF, acc_MR, max_M, sum_M


@triton.jit(do_not_specialize=_STEP_SIZES, do_not_specialize_on_alignment=_STEP_TENSORS)
def attend_latent(
    q_ptr,
    cache_ptr,
    out_ptr,
    parts_ptr,  # None: nothing is split
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    work_ptr,  # None: each run is an item
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    table_stride,
    num_splits,
    least_span,
    item_tokens,
    factor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attend with one item's tokens and a block of GROUP heads; grid (items, head blocks, splits).

    Row m is head m % GROUP of the block, of token m // GROUP. The results of splits are those of
    `attention_kernels.attend`, with the heads of all blocks.
    """
    item = tl.program_id(0)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = ROWS // GROUP
    run, first, start, query_len, context_len = item_of(
        query_start_ptr, seq_lens_ptr, work_ptr, item
    )
    begin, end = reach_of(first, query_len, context_len, TOKENS, 0, TILE)
    if parts_ptr is not None:
        span = span_of(begin, end, num_splits, least_span, TILE)
        is_split = end - begin > span
        begin += split * span
        end = tl.minimum(end, begin + span)
    if (first >= query_len) | (begin >= end):
        return

    m_M = tl.arange(0, ROWS)
    f_F = tl.arange(0, FIRST)
    r_R = FIRST + tl.arange(0, REST)
    # Unused rows repeat the last token, so that they see the same positions.
    tokens_M = tl.minimum(first + m_M // GROUP, query_len - 1)
    heads_M = tl.program_id(1) * GROUP + m_M % GROUP
    is_row_M = (m_M // GROUP < TOKENS) & (first + m_M // GROUP < query_len) & (heads_M < NUM_HEADS)
    places_M = (start + tokens_M).to(tl.int64)
    q_ptrs_M = q_ptr + places_M * q_token_stride + heads_M * q_head_stride
    q_MF = tl.load(q_ptrs_M[:, None] + f_F[None], mask=is_row_M[:, None], other=0.0).to(COMPUTE)
    mask_MR = is_row_M[:, None] & (r_R < HEAD_SIZE)[None]
    q_MR = tl.load(q_ptrs_M[:, None] + r_R[None], mask=mask_MR, other=0.0).to(COMPUTE)

    acc_MF = tl.zeros((ROWS, FIRST), dtype=tl.float32)
    acc_MR = tl.zeros((ROWS, REST), dtype=tl.float32)
    max_M = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros((ROWS,), dtype=tl.float32)
    positions_M = context_len + tokens_M
    table_ptr += run.to(tl.int64) * table_stride
    # All rows see all positions up to that of the first row.
    middle = tl.maximum(begin, tl.minimum(end, context_len + first + 1) // TILE * TILE)
    acc_MF, acc_MR, max_M, sum_M = _advance(
        q_MF, q_MR, acc_MF, acc_MR, max_M, sum_M, begin, middle, positions_M,
        cache_ptr, table_ptr, block_stride, factor,
        HEAD_SIZE, VALUE_SIZE, FIRST, REST, BLOCK_SIZE, TILE, COMPUTE, False,
    )  # fmt: skip
    acc_MF, acc_MR, max_M, sum_M = _advance(
        q_MF, q_MR, acc_MF, acc_MR, max_M, sum_M, middle, end, positions_M,
        cache_ptr, table_ptr, block_stride, factor,
        HEAD_SIZE, VALUE_SIZE, FIRST, REST, BLOCK_SIZE, TILE, COMPUTE, True,
    )  # fmt: skip

    # If an early token sees no position of a split, its result is 0 and its logarithm -inf.
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    mask_MF = is_row_M[:, None] & (f_F < VALUE_SIZE)[None]
    mask_MR = is_row_M[:, None] & (r_R < VALUE_SIZE)[None]
    out_M = out_ptr + places_M * out_token_stride + heads_M * out_head_stride
    acc_MF = acc_MF / sum_M[:, None]
    acc_MR = acc_MR / sum_M[:, None]
    if parts_ptr is not None:
        rows_M = (item * item_tokens + m_M // GROUP).to(tl.int64) * NUM_HEADS + heads_M
        rows_M = rows_M * num_splits + split
        num_rows = tl.num_programs(0).to(tl.int64) * item_tokens * NUM_HEADS
        parts_M = parts_ptr + rows_M * VALUE_SIZE
        tl.store(parts_M[:, None] + f_F[None], acc_MF, mask=mask_MF & is_split)
        if VALUE_SIZE > FIRST:
            tl.store(parts_M[:, None] + r_R[None], acc_MR, mask=mask_MR & is_split)
        logs_ptr = parts_ptr + num_rows * num_splits * VALUE_SIZE
        tl.store(logs_ptr + rows_M, max_M + tl.log2(sum_M), mask=is_row_M & is_split)
        mask_MF = mask_MF & (is_split == 0)
        mask_MR = mask_MR & (is_split == 0)
    element = out_ptr.dtype.element_ty
    tl.store(out_M[:, None] + f_F[None], acc_MF.to(element), mask=mask_MF)
    if VALUE_SIZE > FIRST:
        tl.store(out_M[:, None] + r_R[None], acc_MR.to(element), mask=mask_MR)
