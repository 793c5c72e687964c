"""What the layers of a model keep between steps, and how the blocks for it are shared out.

Workers say what each layer keeps (`KVCacheSpec`). The engine puts layers of equal specs into
groups, may raise a group's block size to a multiple so that pages match, divides the memory by the
bytes of a block, and gives the result to worker and scheduler (`KVCacheConfig`).
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
"""Of element types with scales: bytes of one (float32), for a token's keys or values of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What one layer keeps for each block of `block_size` tokens.

    page_size_bytes: bytes of one block of this layer.
    """

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block of this layer takes."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every token, or of those that a window still shows.

    dtype: name of the element type, one of `DTYPE_BYTES`.
    sliding_window: tokens that a token sees, itself included; 0 for all. The backend applies it. In
        a group whose spec has a window, blocks that have left it are handed out again: a worker's
        table still names them, and what stands in them then is somebody else's, or not finite.
    scale_bytes: bytes of the scales of a token's keys in one head, and as many of its values; 0
        for none. See `SCALE_BYTES`.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int = 0
    scale_bytes: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of the keys and values of one block, with their scales."""
        head_bytes = self.head_size * DTYPE_BYTES[self.dtype] + self.scale_bytes
        return 2 * self.block_size * self.num_kv_heads * head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec(KVCacheSpec):
    """A state of fixed size, such as linear attention keeps: it stands for all tokens so far.

    num_bytes: of one state of this layer; a block holds one.
    snapshots: False: the row's table has one block, read and overwritten by every run. True: the
        table is positional, and a run over tokens [start, end) reads the state from the block of
        token start - 1 (none for start 0), writes the state after the last token of each block
        that it fills to that block, and the state after token end - 1 to the block of that token.
        Then prefixes can be resumed at block borders.
    """

    num_bytes: int
    snapshots: bool = False

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one state."""
        return self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCacheSpec(KVCacheSpec):
    """A layer or a model that keeps nothing; its blocks are only the engine's way of counting."""

    @property
    def page_size_bytes(self) -> int:
        """Nothing is kept."""
        return 0


def aligned(num_bytes: int) -> int:
    """Return `num_bytes`, raised to a multiple of 64: a good place for any element type."""
    return -(-num_bytes // 64) * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table.

    spec: what one of them keeps. layers_per_page: how many of them share a page, because theirs are
    much smaller than those of other groups.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    layers_per_page: int = 1

    @property
    def num_pages(self) -> int:
        """Pages that one block of the group uses: as many buffers."""
        return -(-len(self.layer_names) // self.layers_per_page)

    def place(self, layer: int) -> tuple[int, int]:
        """Return the buffer of the layer with this index, and its first byte within a page.

        Layers that share a page begin at multiples of 64 bytes.
        """
        buffer, position = divmod(layer, self.layers_per_page)
        return buffer, position * aligned(self.spec.page_size_bytes)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that the layers of the group use of one block."""
        return len(self.layer_names) * self.spec.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """How many blocks there are, and which layers use them.

    All groups draw from the same block ids, and a block belongs to one group at a time. So the
    memory is `num_buffers` buffers of `num_blocks` pages of `page_size_bytes` bytes: each layer has
    its place in the pages of one buffer (`KVCacheGroup.place`), the same for all blocks. Groups may
    differ in the number of tokens in a block (`group.spec.block_size`), so that pages match.
    Block 0 is never handed out: its content is undefined, and padding may be written to it.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size(self) -> int:
        """The number of tokens that every group's block size is a multiple of.

        A state that is kept once has no block size: it takes one block, whatever its spec says.
        """
        specs = [group.spec for group in self.groups]
        sizes = [
            spec.block_size for spec in specs if not isinstance(spec, StateSpec) or spec.snapshots
        ]
        return gcd(*sizes) if sizes else specs[0].block_size

    @property
    def num_buffers(self) -> int:
        """Buffers: the pages that a block of the largest group uses."""
        return max(group.num_pages for group in self.groups)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one buffer: what the group that needs most there needs.

        Where that differs between groups, a multiple of 64.
        """
        sizes = {
            (group.layers_per_page - 1) * aligned(group.spec.page_size_bytes)
            + group.spec.page_size_bytes
            for group in self.groups
        }
        return max(sizes) if len(sizes) == 1 else aligned(max(sizes))

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all buffers, padding included."""
        return self.num_buffers * self.page_size_bytes
