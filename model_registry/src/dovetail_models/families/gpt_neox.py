"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia (Biderman et al. 2023, 2304.01373)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail_models.config_reader import (
    Config,
    read_choice,
    read_flag,
    read_number,
    read_optional,
    renamed,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    PlainMLP,
    PreNormBlock,
    TwoNormParallelBlock,
    layer_norm,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.decoder.names import at_layer, at_root, fused_qkv
from dovetail_models.decoder.shape import GELU_TANH_NAMES


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """GPT-NeoX: attention and MLP in parallel or, without `use_parallel_residual`, in sequence."""

    architectures: ClassVar[tuple[str, ...]] = ("GPTNeoXForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu"}

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        heads = read_heads(config)
        bias = read_flag(config, "attention_bias", default=True)
        is_parallel = read_flag(config, "use_parallel_residual", default=True)
        usual = renamed(config, partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
        for field in ("partial_rotary_factor", "rope_theta"):
            read_optional(usual, field)  # an error names the field of the file
        return read_decoder_shape(
            config,
            heads=heads,
            rope=read_rope(usual, heads.head_size, share=0.25),
            norm=layer_norm(read_number(config, "layer_norm_eps", 1e-5)),
            activation=read_choice(config, "hidden_act", ("gelu", *GELU_TANH_NAMES, "relu")),
            block=TwoNormParallelBlock if is_parallel else PreNormBlock,
            mlp=PlainMLP,
            mlp_bias=True,
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings: the rows of q, k and v alternate by head."""
        layer = "gpt_neox.layers.{}"
        return (
            fused_qkv(f"{layer}.attention.query_key_value", groups=shape.heads.num_heads),
            *at_layer(
                layer,
                {
                    "input_layernorm": "input_layernorm",
                    "post_attention_layernorm": "post_attention_layernorm",
                    "attention.dense": "self_attn.o_proj",
                    "mlp.dense_h_to_4h": "mlp.up_proj",
                    "mlp.dense_4h_to_h": "mlp.down_proj",
                },
            ),
            # The causal masks and frequencies of old checkpoints.
            WeightMapping(source=f"{layer}.attention.bias"),
            WeightMapping(source=f"{layer}.attention.masked_bias"),
            WeightMapping(source=f"{layer}.attention.rotary_emb"),
            *at_root(
                {
                    "gpt_neox.embed_in": "model.embed_tokens",
                    "gpt_neox.final_layer_norm": "model.norm",
                    "embed_out": "lm_head",
                }
            ),
        )
