"""Granite 3. Source: Granite team 2024, "Granite 3.0 Language Models"."""

from __future__ import annotations

from typing import ClassVar

from dovetail_models.config_reader import Config, read_flag, read_number
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    read_decoder_shape,
)


class GraniteForCausalLM(DecoderForCausalLM):
    """Llama with multipliers of embeddings, attention scores, branches and logits."""

    architectures: ClassVar[tuple[str, ...]] = ("GraniteForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "attention_bias")
        return read_decoder_shape(
            config,
            mlp_bias=read_flag(config, "mlp_bias"),
            embedding_scale=read_number(config, "embedding_multiplier", 1.0),
            branch_scale=read_number(config, "residual_multiplier", 1.0),
            logit_scale=1 / read_number(config, "logits_scaling", 1.0),
            attention=AttentionOptions(
                qkv_bias=bias,
                output_bias=bias,
                scale=read_number(config, "attention_multiplier", 1.0),
            ),
        )
