"""Checks that the sizes of a model can be sharded over its tensor-parallel workers.

This module reads config.json only, so that an invalid number of workers is rejected before a worker
starts. The layers use the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dovetail.errors import ConfigError

MAX_COUNT = 64

Works = Callable[[int], bool]
"""Returns whether a size can be sharded over the given number of workers."""


def check_tensor_parallel(num_workers: int, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first size that cannot be sharded over `num_workers` workers.

    The message has the size and the valid numbers of workers. Sizes that config.json does not have
    under their usual names are checked by the model.
    """
    if num_workers == 1:
        return
    sizes = list(_sizes(hf_config))
    for what, works in sizes:
        if works(num_workers):
            continue
        valid = _listed(works)
        all_good = _listed(lambda count: all(item(count) for _, item in sizes))
        overall = "" if all_good == valid else f" (for all sizes of the model: {all_good})"
        raise ConfigError(
            f"tensor_parallel_size={num_workers} is not possible: {what} in config.json cannot be "
            f"sharded over {num_workers} workers. Use {valid}{overall}."
        )


def _sizes(hf_config: Mapping[str, Any]) -> Iterator[tuple[str, Works]]:
    """Yield the name of each sharded size, and a function that checks a number of workers."""
    part = hf_config.get("text_config")
    config = part if isinstance(part, Mapping) and "hidden_size" not in hf_config else hf_config
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads") or heads
    if heads:
        yield (
            f"num_attention_heads={heads} with num_key_value_heads={kv_heads}",
            lambda count: not heads % count and not (kv_heads % count and count % kv_heads),
        )
    inner = _count(config, "intermediate_size")
    if inner:
        yield f"intermediate_size={inner}", lambda count: not inner % count
    vocab = _count(config, "vocab_size")
    if vocab:
        # The last worker may have a smaller part of the vocabulary, but not an empty one.
        yield f"vocab_size={vocab}", lambda count: -(-vocab // count) * (count - 1) < vocab


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if type(value) is int and value > 0 else 0


def _listed(works: Works) -> str:
    return ", ".join(str(count) for count in range(1, MAX_COUNT + 1) if works(count))
