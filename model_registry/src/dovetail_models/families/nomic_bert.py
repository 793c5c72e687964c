"""Nomic BERT encoders. Source: Nussbaum et al. 2024, arXiv:2402.01613."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dovetail_models.config_reader import Config, read_number, read_optional, reject, renamed
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderShape,
    GatedMLP,
    layer_norm,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.families.bert import BertModel

_THETA = 1000.0
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OLD_LAYER = {
    "attn.Wqkv": _QKV,
    "attn.out_proj": ("self_attn.o_proj",),
    "norm1": ("input_layernorm",),
    "mlp.fc11": ("mlp.up_proj",),
    "mlp.fc12": ("mlp.gate_proj",),
    "mlp.fc2": ("mlp.down_proj",),
    "norm2": ("post_attention_layernorm",),
}
"""The names of published checkpoints."""
_LAYER = {
    "self_attn.q_proj": _QKV[:1],
    "self_attn.k_proj": _QKV[1:2],
    "self_attn.v_proj": _QKV[2:],
    "self_attn.o_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": ("input_layernorm",),
    "mlp.gate_proj": ("mlp.gate_proj",),
    "mlp.up_proj": ("mlp.up_proj",),
    "mlp.down_proj": ("mlp.down_proj",),
    "post_mlp_layernorm": ("post_attention_layernorm",),
}


class NomicBertModel(BertModel):
    """A BERT with rotary positions and a gated MLP, without biases of linear layers."""

    architectures: ClassVar[tuple[str, ...]] = ("NomicBertModel",)
    prefixes: ClassVar[tuple[str, ...]] = ("", "bert.", "nomic_bert.")
    root_names: ClassVar[Mapping[str, str]] = {**BertModel.root_names, "emb_ln": "embed_norm"}
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{f"encoder.layers.{{}}.{name}": own for name, own in _OLD_LAYER.items()},
        **{f"layers.{{}}.{name}": own for name, own in _LAYER.items()},
    }

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json, with the fields of transformers or older ones.

        Raises ModelError for a mixture of experts and for biases.
        """
        for field, needs in (
            ("moe_every_n_layers", 0),
            ("prenorm", False),
            ("qkv_proj_bias", False),
            ("mlp_fc1_bias", False),
            ("mlp_fc2_bias", False),
            ("rotary_emb_fraction", 1.0),
            ("rotary_emb_interleaved", False),
            ("rotary_emb_scale_base", None),
            ("rotary_scaling_factor", None),
            ("parallel_block", False),
            ("causal", False),
            ("use_rms_norm", False),
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
            ("activation_function", "swiglu"),
            ("hidden_act", "silu"),
        ):
            reject(config, field, needs=needs)
        config = renamed(
            config,
            hidden_size="n_embd",
            intermediate_size="n_inner",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            layer_norm_eps="layer_norm_epsilon",
            rope_theta="rotary_emb_base",
        )
        read_optional(config, "rope_theta")  # an error names the field of the file
        return read_decoder_shape(
            config,
            rope=read_rope(config, read_heads(config).head_size, theta=_THETA, whole_heads=True),
            norm=layer_norm(read_number(config, "layer_norm_eps", 1e-12)),
            activation="silu",
            tied=True,
            mlp=GatedMLP,
            attention=AttentionOptions(bidirectional=True),
        )
