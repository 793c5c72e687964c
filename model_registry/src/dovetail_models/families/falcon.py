"""Falcon. Source: Almazrouei et al. 2023, arXiv:2311.16867."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail_models.config_reader import (
    Config,
    changed,
    read_choice,
    read_count,
    read_flag,
    read_number,
    renamed,
)
from dovetail_models.decoder import (
    AttentionOptions,
    Block,
    DecoderForCausalLM,
    DecoderShape,
    ParallelBlock,
    PlainMLP,
    PreNormBlock,
    TwoNormParallelBlock,
    layer_norm,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.decoder.alibi import alibi_slopes
from dovetail_models.decoder.names import at_layer, at_root, fused_qkv
from dovetail_torch.layers import ACTIVATIONS, HeadShape

OLD_NAMES = {
    "hidden_size": "n_embed",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


class FalconForCausalLM(DecoderForCausalLM):
    """Falcon: layer norms, no gate; parallel branches and ALiBi as config.json states."""

    architectures: ClassVar[tuple[str, ...]] = ("FalconForCausalLM", "RWForCausalLM")

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        config = renamed(config, **OLD_NAMES)
        heads, bias = _read_heads(config), read_flag(config, "bias")
        has_alibi = read_flag(config, "alibi")
        # The scores and their bias are scaled together.
        slopes = alibi_slopes(heads.num_heads, heads.head_size**-0.5) if has_alibi else ()
        inner = 4 * read_count(config, "hidden_size")
        return read_decoder_shape(
            config,
            heads=heads,
            intermediate_size=read_count(config, "ffn_hidden_size", inner),
            rope=None if has_alibi else read_rope(config, heads.head_size, whole_heads=True),
            norm=layer_norm(read_number(config, "layer_norm_epsilon", 1e-5)),
            activation=read_choice(config, "activation", ("gelu", *ACTIVATIONS)),
            tied=read_flag(config, "tie_word_embeddings", default=True),
            block=_read_block(config),
            mlp=PlainMLP,
            mlp_bias=bias,
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias, alibi_slopes=slopes),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings: each group has its queries, then its key and value."""
        layer = "transformer.h.{}"
        qkv = fused_qkv(f"{layer}.self_attention.query_key_value", groups=shape.heads.num_kv_heads)
        norms = ("input_layernorm", "post_attention_layernorm")
        own_norms = ("ln_attn", "ln_mlp") if shape.block is TwoNormParallelBlock else norms
        names = {
            **dict(zip(own_norms, norms, strict=True)),
            "self_attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        }
        root = {"word_embeddings": "embed_tokens", "ln_f": "norm"}
        prefixed = {f"transformer.{own}": f"model.{name}" for own, name in root.items()}
        return (qkv, *at_layer(layer, names), *at_root(prefixed))


def _read_heads(config: Config) -> HeadShape:
    """Return the heads: Falcon 7B has one key-value head, Falcon 40B has groups."""
    if read_flag(config, "new_decoder_architecture"):
        old = changed(renamed(config, num_kv_heads="n_head_kv"), head_dim=None)
        return read_heads(old, kv_field="num_kv_heads")
    num_kv_heads = 1 if read_flag(config, "multi_query", default=True) else None
    return read_heads(changed(config, num_key_value_heads=num_kv_heads, head_dim=None))


def _read_block(config: Config) -> type[Block]:
    if not read_flag(config, "parallel_attn", default=True):
        return PreNormBlock
    num_norms = 2 if read_flag(config, "new_decoder_architecture") else 1
    num_norms = read_count(config, "num_ln_in_parallel_attn", num_norms)
    return TwoNormParallelBlock if num_norms == 2 else ParallelBlock
