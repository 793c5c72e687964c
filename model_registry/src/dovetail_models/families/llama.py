"""Llama 1 to 3. Sources: Touvron et al. 2023, arXiv:2302.13971. The Llama team 2024, 2407.21783."""

from __future__ import annotations

from typing import ClassVar

from dovetail_models.config_reader import Config, read_flag
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    read_decoder_shape,
)


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 1 to 3. `attention_bias` and `mlp_bias` add biases to the linear layers."""

    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "attention_bias")
        return read_decoder_shape(
            config,
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias),
            mlp_bias=read_flag(config, "mlp_bias"),
        )
