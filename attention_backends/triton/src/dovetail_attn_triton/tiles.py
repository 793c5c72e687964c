"""Tile sizes: one static table, by head size, dtype and the device's shared memory.

There is no tuning at run time: a launch is the same in every process. The tiles fit in registers
and shared memory (checked by the compile test). Short items are memory-bound, so their tiles keep
about 100 KiB of keys and values per processor in flight; the tiles of long items give large matrix
products. This module does not depend on tensors or Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class SharedMemory(Enum):
    """The shared memory of a thread block, which limits the size of tiles.

    LARGE: 163 KiB or more (sm_80, sm_90, sm_100). MEDIUM: 99 KiB (sm_86, sm_89, sm_120).
    SMALL: 64 KiB, as the LDS of AMD's CDNA and the local memory of Intel's Xe.
    """

    LARGE = "large"
    MEDIUM = "medium"
    SMALL = "small"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The part of an attention matrix that one Triton program computes, and its launch parameters.

    rows: number of queries: tokens times the query heads of a group. positions: number of positions
    that are processed together.
    """

    rows: int
    positions: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The properties of a layer that determine how its work is split. Equal for most layers.

    short: the tile of requests whose tokens all fit into it. long: the tile of all other requests.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    short: Tile
    long: Tile

    @property
    def group(self) -> int:
        """Number of query heads per key-value head, or per block of heads of latent attention."""
        return -(-self.num_heads // self.num_kv_heads)

    def tokens_of(self, tile: Tile) -> int:
        """Return how many tokens fit into a tile."""
        return tile.rows // self.group


def padded(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


_NARROW = {
    64: (
        Tile(rows=16, positions=64, num_warps=4, num_stages=5),
        Tile(rows=128, positions=64, num_warps=8, num_stages=5),
    ),
    128: (
        Tile(rows=16, positions=32, num_warps=4, num_stages=6),
        Tile(rows=128, positions=64, num_warps=8, num_stages=5),
    ),
    256: (
        Tile(rows=16, positions=32, num_warps=4, num_stages=5),
        Tile(rows=64, positions=32, num_warps=8, num_stages=5),
    ),
}
"""Tiles for elements of two bytes, by padded head size: for short and long runs.

Five pipeline stages result in two buffers of keys and values: Triton loads the block table, which
contains their addresses, as a separate stage before them.
"""

_SHORT_FP8 = {128: Tile(rows=16, positions=32, num_warps=2, num_stages=6)}
"""Tiles of short runs for fp8 caches, where they differ from those of two bytes. On an H200, fewer
warps read 1.7 times as fast, because each converts more elements per instruction; that was measured
with tiles of 64 positions, which spill registers."""

_LONG_FP8 = {64: Tile(rows=128, positions=32, num_warps=8, num_stages=5)}
"""The same for long runs. With 64 positions, e5m2 caches spill registers on sm_100."""

_WIDE = {
    64: (
        Tile(rows=16, positions=32, num_warps=4, num_stages=3),
        Tile(rows=32, positions=32, num_warps=8, num_stages=3),
    ),
    128: (
        Tile(rows=16, positions=32, num_warps=8, num_stages=3),
        Tile(rows=32, positions=32, num_warps=8, num_stages=3),
    ),
    256: (
        Tile(rows=16, positions=16, num_warps=8, num_stages=3),
        Tile(rows=16, positions=16, num_warps=8, num_stages=3),
    ),
}
"""Tiles for float32, which matrix units do not support: correct, but slow."""

_FEW_STAGES = 2
"""Pipeline stages of devices with little shared memory."""


def attention_shape(
    heads: tuple[int, int, int], *, wide: bool, memory: SharedMemory, is_fp8: bool = False
) -> AttentionShape:
    """Return the tiles of a layer.

    heads: numbers of query and key-value heads, and the head size, at most 256. wide: whether
    matrix products are float32. memory: the shared memory of a thread block of the device.
    is_fp8: whether the elements of the cache have one byte.
    """
    num_heads, num_kv_heads, head_size = heads
    table = _WIDE if wide else _NARROW
    size = max(64, padded(head_size))
    short, long = table[size]
    if is_fp8 and not wide:
        long = _LONG_FP8.get(size, long)
        if memory is SharedMemory.LARGE:
            short = _SHORT_FP8.get(size, short)
    if memory is not SharedMemory.LARGE:
        limit = max(16, table[size][1].positions // 2)
        short = replace(short, positions=min(short.positions, limit))
        long = replace(long, rows=min(long.rows, 64), positions=max(16, long.positions // 2))
    if memory is SharedMemory.SMALL:
        short, long = (
            replace(tile, num_stages=min(tile.num_stages, _FEW_STAGES)) for tile in (short, long)
        )
    least_rows = padded(num_heads // num_kv_heads)
    short, long = (replace(tile, rows=max(tile.rows, least_rows)) for tile in (short, long))
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        short=short,
        long=long,
    )
