"""From what layers keep and how much memory there is to the number of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dovetail.errors import CapacityError, ModelError
from dovetail.interfaces.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    NoCacheSpec,
)

_GIB = 1 << 30


def group_layers(
    specs_by_rank: Sequence[Mapping[str, KVCacheSpec]], *, block_size: int
) -> tuple[KVCacheGroup, ...]:
    """Put the layers into groups that share a block table.

    Attention with and without a window shares one: the window is applied by the backend. Raises
    ModelError if the layers keep things of different shapes, or the ranks disagree.
    """
    specs = specs_by_rank[0]
    if any(other != specs for other in specs_by_rank[1:]):
        raise ModelError("the workers disagree on what the model's layers keep; check their models")
    if not specs:
        return (KVCacheGroup(layer_names=(), spec=NoCacheSpec(block_size=block_size)),)
    groups: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        if isinstance(spec, FullAttentionSpec):
            spec = replace(spec, sliding_window=0)
        groups.setdefault(spec, []).append(name)
    if len(groups) > 1:
        shapes = "; ".join(f"{names[0]}: {spec}" for spec, names in groups.items())
        raise ModelError(f"layers that keep caches of different shapes cannot be served: {shapes}")
    return tuple(
        KVCacheGroup(layer_names=tuple(names), spec=spec) for spec, names in groups.items()
    )


def size_cache(
    groups: tuple[KVCacheGroup, ...],
    *,
    available_bytes: int,
    num_blocks: int | None,
    max_useful_tokens: int,
) -> KVCacheConfig:
    """Return how many blocks the memory holds.

    available_bytes: for all groups together. num_blocks: the user's own figure of usable blocks, or
    None. max_useful_tokens: what all requests together can ever hold; no more is taken.
    Raises CapacityError if not even two blocks fit, stating what one takes.
    """
    block_size = groups[0].spec.block_size
    bytes_per_block = sum(group.bytes_per_block for group in groups)
    useful = -(-max_useful_tokens // block_size) + 1
    if num_blocks is None:
        num_blocks = min(useful, available_bytes // bytes_per_block) if bytes_per_block else useful
    if num_blocks < 2:
        raise CapacityError(
            f"the KV cache has {available_bytes / _GIB:.2f} GiB, but two blocks of {block_size} "
            f"tokens take {2 * bytes_per_block / _GIB:.2f} GiB; raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, or choose a smaller model."
        )
    return KVCacheConfig(num_blocks=num_blocks, groups=groups)


def fit_model_len(
    config: KVCacheConfig, *, max_model_len: int, asked_by_user: bool
) -> tuple[int, str]:
    """Return the longest sequence the cache can hold, and why if it is less than `max_model_len`.

    Raises CapacityError where the user asked for a length that does not fit.
    """
    tokens = (config.num_blocks - 1) * config.block_size
    if tokens >= max_model_len:
        return max_model_len, ""
    if asked_by_user:
        needed = -(-max_model_len // config.block_size) + 1
        total = needed * sum(group.bytes_per_block for group in config.groups)
        raise CapacityError(
            f"max_model_len={max_model_len} needs {needed} KV blocks ({total / _GIB:.2f} GiB), but "
            f"there are {config.num_blocks}; lower max_model_len to {tokens} or give more memory "
            "(gpu_memory_utilization, kv_cache_memory_bytes, num_gpu_blocks_override)."
        )
    return tokens, f"the KV cache holds {tokens} tokens"
