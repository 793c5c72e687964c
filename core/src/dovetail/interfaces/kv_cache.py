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
    """Keys and values of every token. A window, where there is one, is the backend's to apply.

    dtype: name of the element type, one of `DTYPE_BYTES`.
    sliding_window: tokens that a token sees, itself included; 0 for all.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of the keys and values of one block."""
        elements = 2 * self.block_size * self.num_kv_heads * self.head_size
        return elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCacheSpec(KVCacheSpec):
    """A layer or a model that keeps nothing; its blocks are only the engine's way of counting."""

    @property
    def page_size_bytes(self) -> int:
        """Nothing is kept."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers of the group."""
        return len(self.layer_names) * self.spec.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """How many blocks there are, and which layers use them.

    Block 0 is never handed out: its content is undefined, and padding may be written to it.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size(self) -> int:
        """Tokens a block, of the first group."""
        return self.groups[0].spec.block_size
