"""Phi-3 and Phi-4. Sources: Abdin et al. 2024, arXiv:2404.14219 and arXiv:2412.08905."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail_models.config_reader import Config, read_count, read_num_layers, read_number
from dovetail_models.decoder import (
    DecoderForCausalLM,
    DecoderShape,
    read_decoder_shape,
    read_heads,
    read_rope,
    rms_norm,
)
from dovetail_models.decoder.names import fused_gate_up, fused_qkv


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3: Llama with fused q, k and v, fused gate and up, and LongRoPE in long models."""

    architectures: ClassVar[tuple[str, ...]] = ("Phi3ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        heads, num_layers = read_heads(config), read_num_layers(config)
        has_window = config.get("sliding_window") is not None
        window = read_count(config, "sliding_window") if has_window else 0
        return read_decoder_shape(
            config,
            heads=heads,
            windows=(window,) * num_layers,
            rope=read_rope(config, heads.head_size),
            norm=rms_norm(read_number(config, "rms_norm_eps", 1e-5)),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings, which declare the layouts of the checkpoint."""
        return (
            fused_qkv("model.layers.{}.self_attn.qkv_proj"),
            fused_gate_up("model.layers.{}.mlp.gate_up_proj"),
        )
