"""Computes what a model and a configuration require of an attention backend.

`attention_requirements` computes requirements from properties of the model. `read_attention_facts`
reads these properties from config.json, without weights and without a tensor library. A worker
reads them from its layers instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.attention import (
    KV_LAYER_SCALES,
    MLA,
    AttentionFacts,
    AttentionRequirements,
)

if TYPE_CHECKING:
    from dovetail.interfaces.engine_config import WorkerConfig

_WINDOWED = "sliding_attention"


def attention_requirements(
    attention: AttentionFacts, config: WorkerConfig, device_type: str, architecture: str = ""
) -> AttentionRequirements:
    """Return the requirements on an attention backend.

    device_type: torch's name, such as "cpu". architecture: the architecture of an assumed device,
    or "".
    """
    features = {
        "sliding_window": attention.sliding_window,
        "soft_cap": attention.soft_cap,
        "sinks": attention.sinks,
        "alibi": attention.alibi,
        "bidirectional": attention.bidirectional,
        MLA: attention.mla,
        "batch_invariant": config.compute.batch_invariant,
        KV_LAYER_SCALES: config.cache.kv_cache_scales == "layer",
    }
    return AttentionRequirements(
        device_type=device_type,
        dtype=config.model.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        head_size=attention.head_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        block_size=config.cache.block_size,
        architecture=architecture,
        features=frozenset(name for name, is_required in features.items() if is_required),
    )


def read_attention_facts(hf_config: Mapping[str, Any]) -> AttentionFacts | None:
    """Return the properties of a model's attention that config.json states.

    Returns None if config.json does not contain the number and size of the attention heads.

    Only the usual field names are read. An architecture may have different defaults, so the worker
    decides from the layers of the loaded model.
    """
    config = _text_part(hf_config)
    num_heads = _count(config, "num_attention_heads")
    hidden_size = _count(config, "hidden_size")
    head_size = _count(config, "head_dim") or hidden_size // (num_heads or 1)
    if not num_heads or not head_size:
        return None
    rank, rotary_dim = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
    if rank and rotary_dim:
        return AttentionFacts(
            head_size=rank + rotary_dim, num_heads=num_heads, num_kv_heads=1, mla=True
        )
    return AttentionFacts(
        head_size=head_size,
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads") or num_heads,
        sliding_window=_has_window(config),
        soft_cap=bool(config.get("attn_logit_softcapping")),
    )


def _text_part(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of the language model if the config has sections, else the config."""
    part = hf_config.get("text_config")
    if isinstance(part, Mapping) and "num_attention_heads" not in hf_config:
        return part
    return hf_config


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _has_window(config: Mapping[str, Any]) -> bool:
    """Return whether any layer has a sliding window that the config does not disable."""
    switch = config.get("use_sliding_window")
    if not config.get("sliding_window") or switch is False:
        return False
    kinds = config.get("layer_types")
    first = config.get("max_window_layers")
    if isinstance(kinds, (list, tuple)):
        return _WINDOWED in kinds and (first is None or bool(switch))
    if isinstance(first, int):
        return bool(switch) and first < _count(config, "num_hidden_layers")
    return True
