"""Gemma 2. Source: Gemma team 2024, arXiv:2408.00118."""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail_models.config_reader import Config, read_choice, read_flag, read_number, read_optional
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    SandwichBlock,
)
from dovetail_models.decoder.shape import GELU_TANH_NAMES
from dovetail_models.families.gemma import read_gemma_shape
from dovetail_models.sliding_windows import read_layer_types, read_windows_of


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Gemma with norms before and after each branch, soft caps, and alternating windows."""

    architectures: ClassVar[tuple[str, ...]] = ("Gemma2ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        config = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
        kinds = read_layer_types(config, pattern=2)
        return read_gemma_shape(
            config,
            windows=read_windows_of(config, kinds),
            attention=read_capped_attention(config),
            **read_sandwich(config),
        )


def read_capped_attention(config: Config, **changes: Any) -> AttentionOptions:
    """Return the attention options: the scale is query_pre_attn_scalar ** -0.5."""
    bias = read_flag(config, "attention_bias")
    return AttentionOptions(
        qkv_bias=bias,
        output_bias=bias,
        scale=read_number(config, "query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=read_optional(config, "attn_logit_softcapping"),
        **changes,
    )


def read_sandwich(config: Config) -> dict[str, Any]:
    """Return the fields of `DecoderShape` that Gemma 2 and 3 share."""
    return {
        "activation": read_choice(config, "hidden_activation", GELU_TANH_NAMES),
        "block": SandwichBlock,
        "logit_cap": read_optional(config, "final_logit_softcapping"),
    }
