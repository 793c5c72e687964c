"""BLOOM. Source: BigScience workshop 2022, arXiv:2211.05100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.interfaces.model import ModelContext, WeightMapping
from dovetail_models.config_reader import (
    Config,
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
    EmbeddingNormDecoder,
    PlainMLP,
    layer_norm,
    read_decoder_shape,
    read_heads,
)
from dovetail_models.decoder.alibi import alibi_slopes
from dovetail_models.decoder.names import at_layer, at_root, fused_qkv


class BloomForCausalLM(DecoderForCausalLM):
    """BLOOM: ALiBi, layer norms and biases in all layers, a tanh GELU without a gate."""

    architectures: ClassVar[tuple[str, ...]] = ("BloomForCausalLM",)
    lacks: ClassVar[frozenset[str]] = frozenset({"positions"})

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        reject(config, "apply_residual_connection_post_layernorm")
        names = {"hidden_size": "n_embed", "num_attention_heads": "n_head"}
        usual = renamed(config, **names, num_hidden_layers="n_layer")
        heads = read_heads(usual)
        return read_decoder_shape(
            usual,
            heads=heads,
            intermediate_size=4 * read_count(usual, "hidden_size"),
            rope=None,
            norm=layer_norm(read_number(config, "layer_norm_epsilon", 1e-5)),
            activation="gelu_pytorch_tanh",
            tied=read_flag(config, "tie_word_embeddings", default=True),
            mlp=PlainMLP,
            mlp_bias=True,
            attention=AttentionOptions(
                qkv_bias=True, output_bias=True, alibi_slopes=alibi_slopes(heads.num_heads)
            ),
        )

    def make_decoder(self, context: ModelContext, shape: DecoderShape) -> EmbeddingNormDecoder:
        """Return the decoder with its first norm."""
        return EmbeddingNormDecoder(context, shape)

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings. Published checkpoints have names without a prefix."""
        names = {
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
            "self_attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        }
        root = {
            "word_embeddings": "model.embed_tokens",
            "word_embeddings_layernorm": "model.embed_norm",
            "ln_f": "model.norm",
        }
        mappings: list[WeightMapping] = []
        for prefix in ("transformer.", ""):
            layer = f"{prefix}h.{{}}"
            qkv = f"{layer}.self_attention.query_key_value"
            mappings.append(fused_qkv(qkv, groups=shape.heads.num_heads))
            mappings += at_layer(layer, names)
            mappings += at_root({prefix + own: module for own, module in root.items()})
        return mappings
