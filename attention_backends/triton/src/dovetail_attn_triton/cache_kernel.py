"""The kernel that writes keys and values to the cache, in its own element type or in fp8.

Cache of a layer: [N, 2, K, B, D], keys before values, so that a program reads one head of a block
in one piece. With scales (fp8), the block's scales follow its elements: float32 [2, K, B].
Knows no torch: what launches it stands in layer.py.

Shape legend: T tokens of a tile, K key-value heads, D head size, N blocks, B block size.
"""

# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def write_cache(
    k_ptr,
    v_ptr,
    cache_ptr,
    scales_ptr,  # None: the cache has no scales
    slots_ptr,
    num_tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    scale_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Put keys and values into their slots; grid (tiles of tokens, key-value heads).

    With scales, a token's keys (and values) of a head are divided by the greatest of them over
    `FP8_MAX`, which becomes the scale. What is not finite stays with its token and head.
    """
    tokens_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    d_D = tl.arange(0, PADDED_SIZE)
    is_token_T = tokens_T < num_tokens
    mask_TD = is_token_T[:, None] & (d_D < HEAD_SIZE)[None, :]
    slots_T = tl.load(slots_ptr + tokens_T, mask=is_token_T, other=0).to(tl.int64)
    blocks_T = slots_T // BLOCK_SIZE
    offsets_T = slots_T % BLOCK_SIZE
    tokens_T = tokens_T.to(tl.int64)
    for which in tl.static_range(2):
        if which == 0:
            source_T = k_ptr + tokens_T * k_token_stride + head * k_head_stride
        else:
            source_T = v_ptr + tokens_T * v_token_stride + head * v_head_stride
        x_TD = tl.load(source_T[:, None] + d_D[None, :], mask=mask_TD, other=0.0)
        places_T = (which * NUM_HEADS + head) * BLOCK_SIZE + offsets_T
        if scales_ptr is not None:
            x_TD = x_TD.to(tl.float32)
            scale_T = tl.max(tl.abs(x_TD), 1) / FP8_MAX
            x_TD = x_TD / tl.where(scale_T == 0.0, 1.0, scale_T)[:, None]
            scale_place_T = scales_ptr + blocks_T * scale_stride + places_T
            tl.store(scale_place_T, scale_T, mask=is_token_T)
        target_T = cache_ptr + blocks_T * block_stride + places_T * HEAD_SIZE
        x_TD = x_TD.to(cache_ptr.dtype.element_ty)
        tl.store(target_T[:, None] + d_D[None, :], x_TD, mask=mask_TD)
