"""Tile sizes of multi-head latent attention, by the device's shared memory.

Each program keeps all features of its results in registers, so its tiles have fewer rows than those
in tiles.py. This module does not depend on tensors or Triton.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail_attn_triton.tiles import AttentionShape, SharedMemory, Tile, padded

_LEAST = 16
"""Smallest size of a matrix product."""

_FEW_ROWS = {
    SharedMemory.LARGE: Tile(rows=16, positions=32, num_warps=4, num_stages=3),
    SharedMemory.MEDIUM: Tile(rows=16, positions=16, num_warps=4, num_stages=2),
    SharedMemory.SMALL: Tile(rows=16, positions=16, num_warps=4, num_stages=1),
}
"""Tiles of up to 16 rows, for elements of two bytes."""

_MANY_ROWS = {
    SharedMemory.LARGE: Tile(rows=32, positions=32, num_warps=8, num_stages=2),
    SharedMemory.MEDIUM: Tile(rows=16, positions=16, num_warps=4, num_stages=2),
    SharedMemory.SMALL: Tile(rows=16, positions=16, num_warps=4, num_stages=1),
}
"""Tiles of more rows: many heads, or several tokens."""

_WIDE = Tile(rows=16, positions=16, num_warps=8, num_stages=1)
"""For float32, which matrix units do not support."""


def first_features(head_size: int) -> int:
    """Return how many features the first part of a vector has: a power of two."""
    return max(_LEAST, padded(head_size + 1) // 2)


def rest_features(head_size: int) -> int:
    """Return how many features the second part of a vector has, with padding; at least 16."""
    return max(_LEAST, padded(max(1, head_size - first_features(head_size))))


def latent_shape(
    num_heads: int, sizes: tuple[int, int], *, wide: bool, memory: SharedMemory
) -> AttentionShape:
    """Return the tiles of a layer. Its "key-value heads" are blocks of query heads.

    sizes: features of a vector and of a value. wide: whether matrix products are float32.
    """
    few, many = (_WIDE, _WIDE) if wide else (_FEW_ROWS[memory], _MANY_ROWS[memory])
    num_blocks = -(-num_heads // many.rows)
    group = -(-num_heads // num_blocks)
    short = few if group <= few.rows else replace(many, rows=max(_LEAST, padded(group)))
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_blocks,
        head_size=sizes[1],
        short=short,
        long=many,
    )
