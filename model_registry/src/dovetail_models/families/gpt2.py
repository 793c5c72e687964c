"""GPT-2. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.interfaces.model import ModelContext, WeightMapping
from dovetail_models.config_reader import (
    Config,
    read_choice,
    read_count,
    read_flag,
    read_number,
    reject,
    renamed,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    PlainMLP,
    PositionDecoder,
    layer_norm,
    read_decoder_shape,
)
from dovetail_models.decoder.names import at_layer, at_root, fused_qkv
from dovetail_models.decoder.shape import GELU_TANH_NAMES

NAMES = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
LINEAR_NAMES = {
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
USUAL = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}


class GPT2LMHeadModel(DecoderForCausalLM):
    """GPT-2: learned positions, layer norms, biases everywhere.

    Matrices are stored as [in, out].
    """

    architectures: ClassVar[tuple[str, ...]] = ("GPT2LMHeadModel",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        reject(config, "scale_attn_by_inverse_layer_idx")
        reject(config, "scale_attn_weights", needs=True)
        reject(config, "add_cross_attention")
        usual = renamed(config, **USUAL)
        inner = 4 * read_count(usual, "hidden_size")
        activations = (*GELU_TANH_NAMES[1:], *GELU_TANH_NAMES[:1], "gelu", "relu")
        return read_decoder_shape(
            usual,
            intermediate_size=read_count(usual, "intermediate_size", inner),
            rope=None,
            norm=layer_norm(read_number(config, "layer_norm_epsilon", 1e-5)),
            activation=read_choice(config, "activation_function", activations),
            tied=read_flag(config, "tie_word_embeddings", default=True),
            mlp=PlainMLP,
            mlp_bias=True,
            attention=AttentionOptions(qkv_bias=True, output_bias=True),
        )

    def make_decoder(self, context: ModelContext, shape: DecoderShape) -> PositionDecoder:
        """Return the decoder with its position table."""
        usual = renamed(context.hf_config, max_position_embeddings="n_positions")
        self.max_positions = read_count(usual, "max_position_embeddings", 1024)
        return PositionDecoder(context, shape, self.max_positions)

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings. The first checkpoints have names without a prefix."""
        mappings: list[WeightMapping] = []
        for prefix in ("transformer.", ""):
            layer = f"{prefix}h.{{}}"
            mappings += [
                fused_qkv(f"{layer}.attn.c_attn", transposed=True),
                *at_layer(layer, LINEAR_NAMES, transposed=True),
                *at_layer(layer, NAMES),
                # The causal masks of old checkpoints.
                WeightMapping(source=f"{layer}.attn.bias"),
                WeightMapping(source=f"{layer}.attn.masked_bias"),
                *at_root(
                    {
                        f"{prefix}wte": "model.embed_tokens",
                        f"{prefix}wpe": "model.embed_positions",
                        f"{prefix}ln_f": "model.norm",
                    }
                ),
            ]
        return mappings
