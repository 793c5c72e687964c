"""What the layers of a model keep between steps, and how the blocks for it are shared out.

Workers say what each layer keeps (`KVCacheSpec`); the engine puts layers of equal specs into
groups, divides the memory by the bytes of a block and tells both sides (`KVCacheConfig`).
Plain data: no tensors, no device.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table. spec: what one of them keeps."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def bytes_per_block(self) -> int:
        """Bytes that the layers of the group use of one block."""
        return len(self.layer_names) * self.spec.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """How many blocks there are, and which layers use them.

    All groups draw from the same block ids, and a block belongs to one group at a time. So the
    memory is `num_buffers` buffers of `num_blocks` pages of `page_size_bytes` bytes: the i-th layer
    of every group lives in buffer i, at the beginning of its pages. All groups have the same block
    size in tokens.
    Block 0 is never handed out: its content is undefined, and padding may be written to it.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.groups[0].spec.block_size

    @property
    def num_buffers(self) -> int:
        """Buffers: the layers of the largest group."""
        return max(len(group.layer_names) for group in self.groups)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one buffer: those of the largest page.

        Where pages differ, a multiple of 64, so that every page begins well for any element type.
        """
        sizes = {group.spec.page_size_bytes for group in self.groups}
        return max(sizes) if len(sizes) == 1 else -(-max(sizes) // 64) * 64

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all buffers, padding included."""
        return self.num_buffers * self.page_size_bytes
