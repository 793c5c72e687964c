"""The kernel that writes keys and values to the cache, in its element type or in fp8.

It can also rotate queries and keys (rotary embedding).

Cache of a layer: [N, 2, K, B, D], keys before values, so that one head of a block is contiguous. An
fp8 cache has a scale for each token and head, or one for all keys and one for all values of the
layer. Per-token scales follow the elements of their block: float32 [2, K, B]. This module does not
depend on torch; layer.py launches it.

Shape legend: T tokens of a tile, K key-value heads, D head size, N blocks, B block size.
"""

# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _put(
    x_TD,
    which: tl.constexpr,
    head,
    slots_T,
    is_token_T,
    cache_ptr,
    scales_ptr,
    layer_scales_ptr,
    block_stride,
    scale_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Write keys (which = 0) or values (1) of one head to their slots.

    With per-token scales, the values of a token are divided by its scale: their largest magnitude /
    `FP8_MAX`. NaN and infinities affect only their token and head. With per-layer scales, the
    quotients are clamped to ±LARGEST; NaN stays NaN.
    """
    d_D = tl.arange(0, PADDED_SIZE)
    blocks_T = slots_T // BLOCK_SIZE
    places_T = (which * NUM_HEADS + head) * BLOCK_SIZE + slots_T % BLOCK_SIZE
    if scales_ptr is not None:
        x_TD = x_TD.to(tl.float32)
        scale_T = tl.max(tl.abs(x_TD), 1) / FP8_MAX
        x_TD = x_TD / tl.where(scale_T == 0.0, 1.0, scale_T)[:, None]
        tl.store(scales_ptr + blocks_T * scale_stride + places_T, scale_T, mask=is_token_T)
    if layer_scales_ptr is not None:
        x_TD = x_TD.to(tl.float32) / tl.load(layer_scales_ptr + which)
        x_TD = tl.where(x_TD > LARGEST, LARGEST, tl.where(x_TD < -LARGEST, -LARGEST, x_TD))
    target_T = cache_ptr + blocks_T * block_stride + places_T * HEAD_SIZE
    mask_TD = is_token_T[:, None] & (d_D < HEAD_SIZE)[None, :]
    tl.store(target_T[:, None] + d_D[None, :], x_TD.to(cache_ptr.dtype.element_ty), mask=mask_TD)


@triton.jit
def _rotated(
    source_T,
    positions_T,
    cos_sin_ptr,
    cos_sin_stride,
    is_token_T,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return one rotated head of each token. The two features of a rotary pair are HALF apart."""
    d_D = tl.arange(0, PADDED_SIZE)
    is_left_D = d_D < HALF
    is_rotated_D = d_D < 2 * HALF
    angle_D = tl.where(is_left_D, d_D, d_D - HALF)
    partner_D = tl.where(is_left_D, d_D + HALF, angle_D)
    mask_TD = is_token_T[:, None] & (d_D < HEAD_SIZE)[None, :]
    rotates_TD = is_token_T[:, None] & is_rotated_D[None, :]
    x_TD = tl.load(source_T[:, None] + d_D[None, :], mask=mask_TD, other=0.0)
    other_TD = tl.load(source_T[:, None] + partner_D[None, :], mask=rotates_TD, other=0.0)
    cos_sin_ptrs_TD = (cos_sin_ptr + positions_T * cos_sin_stride)[:, None] + angle_D[None, :]
    cos_TD = tl.load(cos_sin_ptrs_TD, mask=rotates_TD, other=1.0)
    sin_TD = tl.load(cos_sin_ptrs_TD + HALF, mask=rotates_TD, other=0.0)
    sin_TD = tl.where(is_left_D[None, :], -sin_TD, sin_TD)
    rotated_TD = x_TD.to(tl.float32) * cos_TD + other_TD.to(tl.float32) * sin_TD
    return tl.where(is_rotated_D[None, :], rotated_TD.to(x_TD.dtype), x_TD)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def write_cache(
    q_ptr,
    k_ptr,
    v_ptr,
    rotated_ptr,
    cache_ptr,
    scales_ptr,  # None: tokens have no scales
    layer_scales_ptr,  # None: the layer has no scales; else float32: of keys, of values
    slots_ptr,
    positions_ptr,
    cos_sin_ptr,
    num_tokens,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    rotated_token_stride,
    rotated_head_stride,
    cos_sin_stride,
    block_stride,
    scale_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write keys and values to their slots; with HALF, rotate queries and keys first.

    Grid: (tiles of tokens, key-value heads). With HALF the second dimension also has the query
    heads; their results are written to `rotated`. HALF: half of rotary_dim; 0 for no rotation,
    for which the rotary pointers are None. LARGEST: the largest number of the cache's dtype; in
    a cache with per-layer scales, larger values are clamped to it. Positions are int64, the
    table is float32 [P, rotary_dim]. Source: Su et al. 2021, arXiv:2104.09864.
    """
    tokens_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    d_D = tl.arange(0, PADDED_SIZE)
    is_token_T = tokens_T < num_tokens
    mask_TD = is_token_T[:, None] & (d_D < HEAD_SIZE)[None, :]
    slots_T = tl.load(slots_ptr + tokens_T, mask=is_token_T, other=0).to(tl.int64)
    if HALF > 0:
        positions_T = tl.load(positions_ptr + tokens_T, mask=is_token_T, other=0)
    tokens_T = tokens_T.to(tl.int64)
    if HALF > 0:
        if head < NUM_HEADS:
            source_T = k_ptr + tokens_T * k_token_stride + head * k_head_stride
        else:
            source_T = q_ptr + tokens_T * q_token_stride + (head - NUM_HEADS) * q_head_stride
        x_TD = _rotated(
            source_T,
            positions_T,
            cos_sin_ptr,
            cos_sin_stride,
            is_token_T,
            HEAD_SIZE,
            PADDED_SIZE,
            HALF,
        )
        if head >= NUM_HEADS:
            target_T = rotated_ptr + tokens_T * rotated_token_stride
            target_T += (head - NUM_HEADS) * rotated_head_stride
            tl.store(target_T[:, None] + d_D[None, :], x_TD, mask=mask_TD)
            return
    else:
        source_T = k_ptr + tokens_T * k_token_stride + head * k_head_stride
        x_TD = tl.load(source_T[:, None] + d_D[None, :], mask=mask_TD, other=0.0)
    for which in tl.static_range(2):
        if which == 1:
            source_T = v_ptr + tokens_T * v_token_stride + head * v_head_stride
            x_TD = tl.load(source_T[:, None] + d_D[None, :], mask=mask_TD, other=0.0)
        _put(
            x_TD,
            which,
            head,
            slots_T,
            is_token_T,
            cache_ptr,
            scales_ptr,
            layer_scales_ptr,
            block_stride,
            scale_stride,
            NUM_HEADS,
            HEAD_SIZE,
            PADDED_SIZE,
            BLOCK_SIZE,
            LARGEST,
        )
