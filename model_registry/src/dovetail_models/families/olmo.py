"""OLMo 1. Source: Groeneveld et al. 2024, arXiv:2402.00838."""

from __future__ import annotations

from typing import ClassVar

from dovetail_models.config_reader import Config, read_flag, read_optional
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    layer_norm,
    read_decoder_shape,
)


class OlmoForCausalLM(DecoderForCausalLM):
    """OLMo: Llama with layer norms without parameters; OLMo 7B limits q, k and v to ±`clip_qkv`."""

    architectures: ClassVar[tuple[str, ...]] = ("OlmoForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "attention_bias")
        return read_decoder_shape(
            config,
            norm=layer_norm(1e-5, has_weight=False, has_bias=False),
            attention=AttentionOptions(
                qkv_bias=bias, output_bias=bias, clip=read_optional(config, "clip_qkv")
            ),
        )
