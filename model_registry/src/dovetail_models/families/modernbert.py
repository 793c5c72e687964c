"""ModernBERT encoders. Source: Warner et al. 2024, arXiv:2412.13663.

Dimensions: T tokens, D hidden size, R results, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from dovetail.errors import ModelError
from dovetail.interfaces.model import AttentionContext, ModelContext, WeightMapping
from dovetail_models.config_reader import (
    Config,
    read_choice,
    read_count,
    read_flag,
    read_num_layers,
    read_number,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderShape,
    EmbeddingNormDecoder,
    Rope,
    layer_norm,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.decoder.norms import MakeNorm
from dovetail_models.encoder import ClassHead, Encoder, read_num_labels
from dovetail_models.sliding_windows import read_layer_types

LOCAL, GLOBAL = "sliding_attention", "full_attention"
THETAS = {LOCAL: ("local_rope_theta", 10_000.0), GLOBAL: ("global_rope_theta", 160_000.0)}
_ACTIVATIONS = ("gelu", "silu", "swish", "gelu_new", "gelu_pytorch_tanh")
_HEAD_ACTIVATIONS = {"gelu": functional.gelu, "relu": functional.relu, "silu": functional.silu}
_PREFIXES = ("", "model.")
_ROOT = {"embeddings.tok_embeddings": "embed_tokens", "embeddings.norm": "embed_norm"}
_LAYER = {
    "attn_norm": ("input_layernorm",),
    "attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.Wo": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.Wi": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.Wo": ("mlp.down_proj",),
}


class ModernBertModel(Encoder):
    """A bidirectional encoder with rotary positions; two of three layers have a local window."""

    architectures: ClassVar[tuple[str, ...]] = ("ModernBertModel",)
    unused: ClassVar[tuple[str, ...]] = ("head", "decoder", "classifier")
    """Modules of other heads in a checkpoint, which are not loaded."""

    def __init__(self, context: ModelContext) -> None:
        """Create the modules. Raises ModelError, naming the field of config.json."""
        super().__init__()
        shape = read_shape(context.hf_config)
        self.model = EmbeddingNormDecoder(context, shape)
        self.model.layers[0].input_layernorm = _Unchanged()  # the embedding is already normalized
        self.weight_mappings = tuple(_map_weights(self.unused))

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm: [T, D], or only the tokens needed."""
        return self.model(input_ids_T, positions_T, attention)


class ModernBertForSequenceClassification(ModernBertModel):
    """ModernBERT with a classification head on the first token or on the mean."""

    architectures: ClassVar[tuple[str, ...]] = ("ModernBertForSequenceClassification",)
    unused: ClassVar[tuple[str, ...]] = ("decoder",)

    def __init__(self, context: ModelContext) -> None:
        """Create the modules. Raises ModelError, naming the field of config.json."""
        super().__init__(context)
        config = context.hf_config
        size = read_count(config, "hidden_size")
        self.pooling_type = read_choice(
            {"classifier_pooling": "cls", **config}, "classifier_pooling", ("cls", "mean")
        )
        name = read_choice(
            {"classifier_activation": "gelu", **config},
            "classifier_activation",
            tuple(_HEAD_ACTIVATIONS),
        )
        self.activation = _HEAD_ACTIVATIONS[name]
        self.num_labels = read_num_labels(config)
        has_bias = read_flag(config, "classifier_bias")
        self.dense = ClassHead(context, size, size, has_bias=has_bias)
        self.norm = _read_norm(config)(context, size)
        self.out_proj = ClassHead(context, size, self.num_labels)
        self.weight_mappings = (
            WeightMapping(source="head.dense", targets=("dense",)),
            WeightMapping(source="head.norm", targets=("norm",)),
            WeightMapping(source="classifier", targets=("out_proj",)),
            *self.weight_mappings,
        )

    def classify(self, pooled_RD: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the classification head, [R, L]."""
        return self.out_proj(self.norm(self.activation(self.dense(pooled_RD))))


class _Unchanged(nn.Module):
    """A module that is used in place of a norm and returns its argument."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD


def read_shape(config: Config) -> DecoderShape:
    """Return the shape defined by config.json. Raise ModelError if it is not supported."""
    kinds = _read_layer_types(config)
    heads = read_heads(config)
    window = read_count(config, "local_attention", 128) // 2 + 1  # half on each side
    ropes = {kind: _read_rope(config, heads.head_size, kind) for kind in set(kinds)}
    has_bias = read_flag(config, "attention_bias")
    return read_decoder_shape(
        config,
        heads=heads,
        windows=tuple(window if kind == LOCAL else 0 for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        norm=_read_norm(config),
        activation=read_choice(
            {"hidden_activation": "gelu", **config}, "hidden_activation", _ACTIVATIONS
        ),
        mlp_bias=read_flag(config, "mlp_bias"),
        tied=True,
        attention=AttentionOptions(qkv_bias=has_bias, output_bias=has_bias, bidirectional=True),
    )


def _read_norm(config: Config) -> MakeNorm:
    return layer_norm(
        read_number(config, "norm_eps", 1e-5), has_bias=read_flag(config, "norm_bias")
    )


def _read_layer_types(config: Config) -> Sequence[str]:
    if config.get("layer_types") is not None:
        return read_layer_types(config, pattern=3)
    period = read_count(config, "global_attn_every_n_layers", 3)
    return [LOCAL if index % period else GLOBAL for index in range(read_num_layers(config))]


def _read_rope(config: Config, head_size: int, kind: str) -> Rope:
    """Return the RoPE of a layer type, from the per-type parameters or the older fields."""
    field, theta = THETAS[kind]
    by_type = config.get("rope_parameters")
    if not (isinstance(by_type, dict) and kind in by_type):
        if config.get("rope_scaling"):
            raise ModelError("config.json: rope_scaling is not supported for ModernBERT")
        theta = read_number(config, field, theta)
        config = {**config, "rope_parameters": None, "rope_theta": theta}
    return read_rope(config, head_size, layer_type=kind, theta=theta, whole_heads=True)


def _map_weights(unused: Sequence[str]) -> Sequence[WeightMapping]:
    mappings = [WeightMapping(source=name) for name in unused]
    for prefix in _PREFIXES:
        mappings += [
            WeightMapping(source=f"{prefix}{name}", targets=(f"model.{own}",))
            for name, own in (_ROOT | {"final_norm": "norm"}).items()
        ]
        mappings += [
            WeightMapping(
                source=f"{prefix}layers.{{}}.{name}",
                targets=tuple(f"model.layers.{{}}.{own}" for own in targets),
            )
            for name, targets in _LAYER.items()
        ]
    return mappings
