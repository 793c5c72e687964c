"""SmolLM 3. Source: Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"."""

from __future__ import annotations

from typing import ClassVar

from dovetail_models.config_reader import Config, read_flag
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    read_decoder_shape,
    read_heads,
    read_rope,
    read_rotary_layers,
)
from dovetail_models.sliding_windows import read_windows_of


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """SmolLM 3: Llama without RoPE in every fourth layer (Yang et al. 2025, arXiv:2501.18795)."""

    architectures: ClassVar[tuple[str, ...]] = ("SmolLM3ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "attention_bias")
        is_rotary = read_rotary_layers(config)
        size = read_heads(config).head_size
        rope = read_rope(config, size, theta=2_000_000.0, whole_heads=True)
        return read_decoder_shape(
            config,
            windows=_read_windows(config, is_rotary),
            ropes=tuple(rope if rotary else None for rotary in is_rotary),
            tied=read_flag(config, "tie_word_embeddings", default=True),
            mlp_bias=read_flag(config, "mlp_bias"),
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias),
        )


def _read_windows(config: Config, is_rotary: list[bool]) -> tuple[int, ...]:
    if not read_flag(config, "use_sliding_window") or config.get("sliding_window") is None:
        return (0,) * len(is_rotary)
    stated = config.get("layer_types")
    kinds = stated or ["full_attention" if item else "sliding_attention" for item in is_rotary]
    return read_windows_of(config, kinds)
