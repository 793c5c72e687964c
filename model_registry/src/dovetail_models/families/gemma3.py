"""Gemma 3, the text model. Source: Gemma team 2025, arXiv:2503.19786."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from dovetail_models.config_reader import Config, read_number
from dovetail_models.decoder import (
    DecoderForCausalLM,
    DecoderShape,
    Rope,
    norm_of_each_head,
    offset_rms_norm,
    read_heads,
    read_rope,
)
from dovetail_models.families.gemma import read_gemma_shape
from dovetail_models.families.gemma2 import read_capped_attention, read_sandwich
from dovetail_models.sliding_windows import read_layer_types, read_windows_of

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Gemma 2 with norms on queries and keys, and other rotary frequencies in windowed layers."""

    architectures: ClassVar[tuple[str, ...]] = ("Gemma3ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        norm = offset_rms_norm(read_number(config, "rms_norm_eps", 1e-6))
        kinds = read_layer_types(config, pattern=6)
        heads = read_heads(config, head_size=256)
        ropes = {kind: _read_rope(config, heads.head_size, kind) for kind in set(kinds)}
        return read_gemma_shape(
            config,
            heads=heads,
            norm=norm,
            windows=read_windows_of(config, kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
            attention=replace(  # transformers ignores attn_logit_softcapping
                read_capped_attention(config, qk_norm=norm_of_each_head(norm)), soft_cap=0.0
            ),
            **read_sandwich(config),
        )


def _read_rope(config: Config, head_size: int, kind: str) -> Rope:
    """Return the RoPE of a layer type, from the per-type parameters or the older fields."""
    by_type = config.get("rope_parameters")
    is_local = kind == "sliding_attention"
    theta = LOCAL_THETA if is_local else GLOBAL_THETA
    if is_local and not (isinstance(by_type, dict) and kind in by_type):
        local_theta = read_number(config, "rope_local_base_freq", LOCAL_THETA)
        config = {**config, "rope_theta": local_theta, "rope_scaling": None}
        config["rope_parameters"] = None
    return read_rope(config, head_size, layer_type=kind, theta=theta, whole_heads=True)
