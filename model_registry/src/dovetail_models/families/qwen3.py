"""Qwen 3. Source: Yang et al. 2025, arXiv:2505.09388."""

from __future__ import annotations

from typing import ClassVar

from dovetail_models.config_reader import Config, read_flag, read_number
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    norm_of_each_head,
    read_decoder_shape,
    read_heads,
    rms_norm,
)
from dovetail_models.sliding_windows import read_qwen_windows


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen 3: Qwen 2 with norms on queries and keys. Biases only with `attention_bias`."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "attention_bias")
        norm = rms_norm(read_number(config, "rms_norm_eps", 1e-6))
        return read_decoder_shape(
            config,
            heads=read_heads(config, head_size=128),
            windows=read_qwen_windows(config),
            norm=norm,
            attention=AttentionOptions(
                qkv_bias=bias, output_bias=bias, qk_norm=norm_of_each_head(norm)
            ),
        )
