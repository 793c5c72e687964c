"""From what each layer keeps to groups of layers that share a block table.

All groups share the block ids and the memory behind them: the i-th layer of every group lives in
the same buffer, so that a block is of use to any of them. Groups should be of one size, then, or
memory is lost to padding. Knows no amount of memory and no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dovetail.errors import ModelError
from dovetail.interfaces.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    NoCacheSpec,
)
from dovetail.kv_cache.demand import sequence_blocks

_SLACK = 1.1
"""Memory is given up to this factor to have fewer groups: each costs host time in every step."""

Groups = tuple[KVCacheGroup, ...]


def group_layers(
    specs_by_rank: Sequence[Mapping[str, KVCacheSpec]], *, block_size: int, max_model_len: int
) -> Groups:
    """Put the layers into groups that share a block table.

    block_size: for a model without layers that keep anything. max_model_len: tokens of the longest
    sequence: what it takes decides. Layers with windows get groups of their own where that saves
    memory; else they share one with full attention, and the backend alone applies the window.
    Raises ModelError if the ranks disagree or block sizes differ.
    """
    specs = specs_by_rank[0]
    if any(other != specs for other in specs_by_rank[1:]):
        raise ModelError("the workers disagree on what the model's layers keep; check their models")
    if not specs:
        return (KVCacheGroup(layer_names=(), spec=NoCacheSpec(block_size=block_size)),)
    if len({spec.block_size for spec in specs.values()}) > 1:
        shapes = "; ".join(f"{name}: {spec.block_size}" for name, spec in specs.items())
        raise ModelError(f"the layers' blocks must hold equally many tokens, but: {shapes}")
    choices = [
        _split(layers, size)
        for layers in (_collect(specs, keep_windows=False), _collect(specs, keep_windows=True))
        for size in range(1, max(map(len, layers.values())) + 1)
    ]
    costs = [_bytes_of_sequence(groups, max_model_len) for groups in choices]
    most = _SLACK * min(costs)
    good = [groups for groups, cost in zip(choices, costs, strict=True) if cost <= most]
    return min(good, key=len)


def padding_share(groups: Groups) -> float:
    """Return which share of the cache's memory no layer uses, 0 to 1, if groups hold equal parts.

    It comes of groups with fewer layers than the largest, and of layers with smaller pages.
    """
    config = KVCacheConfig(num_blocks=1, groups=groups)
    total = config.bytes_per_block * len(groups)
    return 1 - sum(group.bytes_per_block for group in groups) / total if total else 0.0


def _collect(
    specs: Mapping[str, KVCacheSpec], *, keep_windows: bool
) -> dict[KVCacheSpec, list[str]]:
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        if isinstance(spec, FullAttentionSpec) and not keep_windows:
            spec = replace(spec, sliding_window=0)
        layers.setdefault(spec, []).append(name)
    return layers


def _split(layers: Mapping[KVCacheSpec, Sequence[str]], size: int) -> Groups:
    """Cut each kind's layers into groups of at most `size`, in the order of the layers."""
    return tuple(
        KVCacheGroup(layer_names=tuple(names[start : start + size]), spec=spec)
        for spec, names in layers.items()
        for start in range(0, len(names), size)
    )


def _bytes_of_sequence(groups: Groups, num_tokens: int) -> int:
    config = KVCacheConfig(num_blocks=1, groups=groups)
    num_blocks = sequence_blocks(config, num_tokens, max_step_tokens=config.block_size)
    return num_blocks * config.bytes_per_block
