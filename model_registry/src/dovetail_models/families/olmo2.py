"""OLMo 2 and OLMo 3. Sources: OLMo team 2024, arXiv:2501.00656, and 2025, arXiv:2512.13961."""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail_models.config_reader import Config, read_flag, read_number
from dovetail_models.decoder import (
    AttentionOptions,
    BranchNormBlock,
    DecoderForCausalLM,
    DecoderShape,
    norm_of_all_heads,
    read_decoder_shape,
    read_heads,
    read_rope,
    rms_norm,
)
from dovetail_models.sliding_windows import read_layer_types, read_windows_of


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2: Llama with norms after the branches, and norms over all queries and over all keys."""

    architectures: ClassVar[tuple[str, ...]] = ("Olmo2ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        return _read_shape(config)


class Olmo3ForCausalLM(DecoderForCausalLM):
    """OLMo 3: OLMo 2 with a sliding window and different rotary angles in 3 of 4 layers."""

    architectures: ClassVar[tuple[str, ...]] = ("Olmo3ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        kinds = read_layer_types(config, pattern=4)
        size = read_heads(config).head_size
        ropes = {
            kind: read_rope(
                _without_scaling(config) if kind == "sliding_attention" else config,
                size,
                layer_type=kind,
                theta=500_000.0,
                whole_heads=True,
            )
            for kind in set(kinds)
        }
        return _read_shape(
            config,
            windows=read_windows_of(config, kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
        )


def _read_shape(config: Config, **changes: Any) -> DecoderShape:
    bias = read_flag(config, "attention_bias")
    eps = read_number(config, "rms_norm_eps", 1e-5)
    return read_decoder_shape(
        config,
        norm=rms_norm(eps),
        block=BranchNormBlock,
        attention=AttentionOptions(qkv_bias=bias, output_bias=bias, qk_norm=norm_of_all_heads(eps)),
        **changes,
    )


def _without_scaling(config: Config) -> Config:
    """Return the config without RoPE scaling: older files apply it to full attention only."""
    return {**config, "rope_scaling": None}
