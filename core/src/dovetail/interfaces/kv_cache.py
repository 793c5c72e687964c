"""The KV cache of a model: specs of its layers, groups of layers, and the memory layout.

Workers return a `KVCacheSpec` for each layer. The engine groups layers of equal specs, may raise
the block size of a group to a multiple so that page sizes match, and divides the memory by the
bytes of a block. The result is a `KVCacheConfig` for worker and scheduler.
Plain data: no tensors, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}

SCALE_BYTES = {"int8": 4, "fp8_e4m3": 4}
"""Bytes of the float32 scale for a token's keys or values in one head, by element type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The cache of one layer, in blocks of `block_size` tokens.

    page_size_bytes: bytes of one block of this layer.
    """

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of all tokens, or of the tokens in a sliding window or in a chunk.

    dtype: name of the element type, one of `DTYPE_BYTES`.
    sliding_window: number of tokens that a token attends to, itself included; 0 for all. The
        backend applies it. Blocks that have left the window are freed and reused, but remain in the
        worker's block table: their content belongs to other requests and may not be finite.
    chunk_size: a token at position p attends only to positions of its chunk, p // chunk_size; 0 for
        no chunks. Blocks of earlier chunks are freed like those that have left a window. A layer
        has a window or chunks, not both.
    scale_bytes: bytes of the scale of a token's keys in one head; the scale of its values has the
    same size. 0 for no scales. See `SCALE_BYTES`.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int = 0
    scale_bytes: int = 0
    chunk_size: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of the keys and values of one block, with their scales."""
        head_bytes = self.head_size * DTYPE_BYTES[self.dtype] + self.scale_bytes
        return 2 * self.block_size * self.num_kv_heads * head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(FullAttentionSpec):
    """Keys of all tokens, which contain their values: multi-head latent attention.

    Each token has one vector of `head_size` features in each key-value head; normally there is one
    head. Source: DeepSeek-AI 2024, arXiv:2405.04434.
    value_size: the value is the first `value_size` features of the key.
    """

    value_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of the keys of one block, with their scales."""
        head_bytes = self.head_size * DTYPE_BYTES[self.dtype] + self.scale_bytes
        return self.block_size * self.num_kv_heads * head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec(KVCacheSpec):
    """A state of fixed size that summarizes all previous tokens, as in linear attention.

    num_bytes: bytes of one state of this layer; a block holds one state.
    snapshots: if False, the block table of a request has one block, which every step reads and
        overwrites. If True, the table is indexed by position. A step that computes tokens
        [start, end) of a request reads the state from the block of token start - 1 (none for
        start 0). It writes the state after the last token of each block that it fills to that
        block, and the state after token end - 1 to that token's block.
        Because of these snapshots, a request can resume a cached prefix at a block boundary.
    """

    num_bytes: int
    snapshots: bool = False

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one state."""
        return self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCacheSpec(KVCacheSpec):
    """A layer or model without a cache. Its blocks have no memory. The engine only counts them."""

    @property
    def page_size_bytes(self) -> int:
        """Return 0."""
        return 0


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of 64, aligned for any element type."""
    return -(-num_bytes // 64) * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table.

    spec: the cache of one layer. layers_per_page: number of layers that share a page, because their
    pages are much smaller than the pages of other groups.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    layers_per_page: int = 1

    @property
    def num_pages(self) -> int:
        """Number of pages in one block of the group. Each page is in a different buffer."""
        return -(-len(self.layer_names) // self.layers_per_page)

    def place(self, layer: int) -> tuple[int, int]:
        """Return a layer's (buffer index, byte offset in a page). layer: its index in the group.

        Layers that share a page are aligned to 64 bytes.
        """
        buffer, position = divmod(layer, self.layers_per_page)
        return buffer, position * aligned(self.spec.page_size_bytes)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block that the layers of the group use."""
        return len(self.layer_names) * self.spec.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The memory layout of the KV cache.

    All groups share the same block ids, and a block belongs to one group at a time. The memory is
    `num_buffers` buffers of `num_blocks` pages of `page_size_bytes` bytes. A layer has a fixed
    offset in the pages of one buffer (`KVCacheGroup.place`). Groups may have different block sizes
    (`group.spec.block_size`), so that page sizes match.
    Block 0 is never allocated: its content is undefined, and padding may be written to it.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size(self) -> int:
        """The greatest common divisor of the block sizes of all groups.

        A state without snapshots takes one block, so its block size is ignored.
        """
        specs = [group.spec for group in self.groups]
        sizes = [
            spec.block_size for spec in specs if not isinstance(spec, StateSpec) or spec.snapshots
        ]
        return gcd(*sizes) if sizes else specs[0].block_size

    @property
    def num_buffers(self) -> int:
        """Number of buffers: the maximum of `num_pages` over all groups."""
        return max(group.num_pages for group in self.groups)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one buffer: the maximum over all groups.

        If groups differ, it is rounded up to a multiple of 64.
        """
        sizes = {
            (group.layers_per_page - 1) * aligned(group.spec.page_size_bytes)
            + group.spec.page_size_bytes
            for group in self.groups
        }
        return max(sizes) if len(sizes) == 1 else aligned(max(sizes))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all buffers, padding included."""
        return self.num_buffers * self.page_size_bytes
