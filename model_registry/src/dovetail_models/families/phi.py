"""Phi-1, Phi-1.5 and Phi-2. Source: Li et al. 2023, arXiv:2309.05463."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail_models.config_reader import Config, read_choice, read_flag, read_number
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    ParallelBlock,
    PlainMLP,
    layer_norm,
    norm_of_each_head,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.decoder.names import at_layer
from dovetail_models.decoder.shape import GELU_TANH_NAMES


class PhiForCausalLM(DecoderForCausalLM):
    """Phi: attention and MLP in parallel with layer norms, biases everywhere and partial rotary."""

    architectures: ClassVar[tuple[str, ...]] = ("PhiForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu_new"}

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        heads = read_heads(config)
        norm = layer_norm(read_number(config, "layer_norm_eps", 1e-5))
        has_head_norm = read_flag(config, "qk_layernorm")
        return read_decoder_shape(
            config,
            heads=heads,
            rope=read_rope(config, heads.head_size, share=0.5),
            norm=norm,
            activation=read_choice(config, "hidden_act", (*GELU_TANH_NAMES[1:], "gelu", "relu")),
            block=ParallelBlock,
            mlp=PlainMLP,
            mlp_bias=True,
            head_bias=True,
            attention=AttentionOptions(
                qkv_bias=True,
                output_bias=True,
                qk_norm=norm_of_each_head(norm) if has_head_norm else None,
            ),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings."""
        return (
            WeightMapping(source="model.final_layernorm", targets=("model.norm",)),
            *at_layer(
                "model.layers.{}",
                {
                    "self_attn.dense": "self_attn.o_proj",
                    "self_attn.q_layernorm": "self_attn.q_norm",
                    "self_attn.k_layernorm": "self_attn.k_norm",
                    "mlp.fc1": "mlp.up_proj",
                    "mlp.fc2": "mlp.down_proj",
                },
            ),
        )
