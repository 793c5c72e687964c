"""MPT. Source: MosaicML 2023, "Introducing MPT-7B"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from dovetail.errors import ModelError
from dovetail.interfaces.model import WeightMapping
from dovetail.value_checks import shorten
from dovetail_models.config_reader import (
    Config,
    read_count,
    read_flag,
    read_number,
    read_optional,
    reject,
    renamed,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    PlainMLP,
    layer_norm,
    read_decoder_shape,
    read_heads,
)
from dovetail_models.decoder.alibi import mpt_slopes
from dovetail_models.decoder.names import at_layer, at_root, fused_qkv


class MptForCausalLM(DecoderForCausalLM):
    """MPT: ALiBi, layer norms and linear layers without biases, an exact GELU without a gate."""

    architectures: ClassVar[tuple[str, ...]] = ("MptForCausalLM", "MPTForCausalLM")
    lacks: ClassVar[frozenset[str]] = frozenset({"positions"})

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        reject(config, "no_bias", needs=True)
        reject(config, "logit_scale", needs=None)
        reject(config, "embedding_fraction", needs=1.0)
        names = {"hidden_size": "d_model", "num_attention_heads": "n_heads"}
        usual = renamed(config, **names, num_hidden_layers="n_layers")
        ratio = read_count(config, "expansion_ratio", 4)
        heads = read_heads(usual)
        return read_decoder_shape(
            usual,
            heads=heads,
            intermediate_size=ratio * read_count(usual, "hidden_size"),
            rope=None,
            norm=layer_norm(read_number(config, "layer_norm_epsilon", 1e-5), has_bias=False),
            activation="gelu",
            tied=read_flag(config, "tie_word_embeddings", default=True),
            mlp=PlainMLP,
            attention=_read_attention(config, heads.num_heads),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings."""
        layer = "transformer.blocks.{}"
        names = {
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
            "attn.out_proj": "self_attn.o_proj",
            "ffn.up_proj": "mlp.up_proj",
            "ffn.down_proj": "mlp.down_proj",
        }
        root = {"transformer.wte": "model.embed_tokens", "transformer.norm_f": "model.norm"}
        return (fused_qkv(f"{layer}.attn.Wqkv"), *at_layer(layer, names), *at_root(root))


def _read_attention(config: Config, num_heads: int) -> AttentionOptions:
    """Return the options of the section `attn_config`."""
    section = config.get("attn_config") or {}
    if not isinstance(section, Mapping):
        raise ModelError(f"config.json: attn_config is {shorten(section)}; it must be an object")
    reject(section, "alibi", needs=True)
    reject(section, "qk_ln")
    reject(section, "prefix_lm")
    reject(section, "attn_type", needs="multihead_attention")
    return AttentionOptions(
        scale=read_optional(section, "softmax_scale"),
        clip=read_optional(section, "clip_qkv"),
        alibi_slopes=mpt_slopes(num_heads, read_number(section, "alibi_bias_max", 8)),
    )
