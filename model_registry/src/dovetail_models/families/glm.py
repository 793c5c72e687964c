"""GLM-4. Source: GLM team 2024, arXiv:2406.12793; GLM-4-0414 adds norms after the branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail_models.config_reader import Config, read_flag, read_number
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    SandwichBlock,
    read_decoder_shape,
    read_heads,
    read_rope,
    rms_norm,
)
from dovetail_models.decoder.names import at_layer, fused_gate_up, rotary_pairs


class GlmForCausalLM(DecoderForCausalLM):
    """Llama with biases on q, k and v, and rotary pairs in half of each head."""

    architectures: ClassVar[tuple[str, ...]] = ("GlmForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        return _read_shape(config)

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings, which declare the layouts of the checkpoint."""
        (rope, *_) = shape.ropes
        rotary_dim = rope.rotary_dim if rope is not None else 0
        return (
            *rotary_pairs(shape.heads.head_size, rotary_dim),
            fused_gate_up("model.layers.{}.mlp.gate_up_proj"),
        )


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: norms before and after each branch."""

    architectures: ClassVar[tuple[str, ...]] = ("Glm4ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        return _read_shape(config, block=SandwichBlock)

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings. Checkpoints give the norms of Gemma 2 other names."""
        names = {
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
        return (*super().map_weights(shape), *at_layer("model.layers.{}", names))


def _read_shape(config: Config, **changes: Any) -> DecoderShape:
    heads = read_heads(config, head_size=128)
    return read_decoder_shape(
        config,
        heads=heads,
        rope=read_rope(config, heads.head_size, share=0.5),
        norm=rms_norm(read_number(config, "rms_norm_eps", 1.5625e-07)),
        attention=AttentionOptions(qkv_bias=read_flag(config, "attention_bias", default=True)),
        **changes,
    )
