"""Computes the number of blocks and the maximum request length from the available memory."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.errors import CapacityError
from dovetail.interfaces.kv_cache import KVCacheConfig, KVCacheGroup
from dovetail.kv_cache.demand import max_sequence_tokens, sequence_blocks

_GIB = 1 << 30
_MAX_BLOCKS = 2**31 - 1
"""Maximum number of blocks, because block ids are 32-bit integers."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The maximum load of the KV cache.

    max_num_seqs: running requests. max_model_len: tokens per request. max_step_tokens: tokens per
    step.
    """

    max_num_seqs: int
    max_model_len: int
    max_step_tokens: int


def size_cache(
    groups: tuple[KVCacheGroup, ...],
    load: Load,
    *,
    available_bytes: int,
    num_blocks: int | None,
) -> KVCacheConfig:
    """Return a layout with as many blocks as fit into memory, even if `load` needs fewer.

    If no group has a cache, the layout has as many blocks as `load` can use.
    available_bytes: memory for all groups together. num_blocks: the user's number, block 0
    included, or None. Raises CapacityError with the size of a block if two blocks do not fit.
    """
    config = KVCacheConfig(num_blocks=2, groups=groups)
    block_size, bytes_per_block = config.block_size, config.bytes_per_block
    if num_blocks is None and bytes_per_block:
        num_blocks = min(available_bytes // bytes_per_block, _MAX_BLOCKS)
    elif num_blocks is None:
        num_blocks = 1 + load.max_num_seqs * sequence_blocks(
            config, load.max_model_len, max_step_tokens=load.max_step_tokens
        )
    if num_blocks < 2:
        raise CapacityError(
            f"the memory for the KV cache is {_size(available_bytes)}, but two blocks of "
            f"{block_size} tokens "
            f"take {_size(2 * bytes_per_block)}; raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, or choose a smaller model."
        )
    return KVCacheConfig(num_blocks=num_blocks, groups=groups)


def fit_model_len(
    config: KVCacheConfig, *, max_model_len: int, max_step_tokens: int, requested_by_user: bool
) -> tuple[int, str]:
    """Return the longest sequence that fits, and the reason if it is less than `max_model_len`.

    max_step_tokens: tokens per step. Raises CapacityError if the length that the user set does not
    fit, or if no block of a sequence fits.
    """
    tokens = max_sequence_tokens(config, max_step_tokens=max_step_tokens)
    if tokens >= max_model_len:
        return max_model_len, ""
    if requested_by_user or not tokens:
        needed = 1 + sequence_blocks(config, max_model_len, max_step_tokens=max_step_tokens)
        total = needed * config.bytes_per_block
        raise CapacityError(
            f"max_model_len={max_model_len} needs {needed} KV blocks ({_size(total)}), but "
            f"only {config.num_blocks} exist; lower max_model_len to {tokens}, or raise the "
            "cache memory "
            "(gpu_memory_utilization, kv_cache_memory_bytes, num_gpu_blocks_override)."
        )
    return tokens, f"the KV cache holds {tokens} tokens"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB // 100 else f"{num_bytes} bytes"
