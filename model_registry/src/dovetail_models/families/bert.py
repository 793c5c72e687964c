"""BERT and RoBERTa encoder models.

Sources: Devlin et al. 2018, arXiv:1810.04805; Liu et al. 2019, arXiv:1907.11692.

Dimensions: T tokens, D hidden size, R results, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import (
    TOKEN_TYPE_BIT,
    AttentionContext,
    ModelContext,
    WeightMapping,
)
from dovetail_models.config_reader import Config, read_choice, read_count, read_number, reject
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderShape,
    PlainMLP,
    PostNormBlock,
    layer_norm,
    read_decoder_shape,
)
from dovetail_models.decoder.attention import SelfAttention
from dovetail_models.decoder.causal_lm import make_rotaries
from dovetail_models.encoder import ClassHead, Encoder, read_num_labels
from dovetail_torch.layers import VocabParallelEmbedding

_ROOT = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embed_positions",
    "embeddings.token_type_embeddings": "embed_types",
    "embeddings.LayerNorm": "embed_norm",
}
_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "input_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_attention_layernorm",
}
_UNUSED = ("embeddings.position_ids", "pooler", "cls", "lm_head")
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", "swish")


def _read_shape(config: Config) -> DecoderShape:
    reject(config, "position_embedding_type", needs="absolute")
    reject(config, "is_decoder")
    return read_decoder_shape(
        config,
        rope=None,
        norm=layer_norm(read_number(config, "layer_norm_eps", 1e-12)),
        activation=read_choice(config, "hidden_act", _ACTIVATIONS),
        tied=True,
        mlp=PlainMLP,
        mlp_bias=True,
        attention=AttentionOptions(qkv_bias=True, output_bias=True, bidirectional=True),
    )


class BertModel(Encoder):
    """A bidirectional encoder with learned positions and token types; norms follow each branch.

    If its shape has rotary positions, it has no learned ones. prefixes: starts of names in
    checkpoints, the usual one first. unused_names: parts of checkpoints with another head.
    layer_names: modules of a layer by their names in checkpoints. default_types: the default of
    type_vocab_size; 0 for an architecture without token types.
    """

    provides: ClassVar[frozenset[str]] = Encoder.provides | {"token_types"}
    lacks: ClassVar[frozenset[str]] = frozenset({"final_norm"})
    architectures: ClassVar[tuple[str, ...]] = ("BertModel",)
    prefixes: ClassVar[tuple[str, ...]] = ("", "bert.", "roberta.")
    unused_names: ClassVar[tuple[str, ...]] = _UNUSED
    default_types: ClassVar[int] = 2
    root_names: ClassVar[Mapping[str, str]] = _ROOT
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        f"encoder.layer.{{}}.{name}": (own,) for name, own in _LAYER.items()
    }
    offset: int = 0

    def __init__(self, context: ModelContext) -> None:
        """Create the modules. Raises ModelError, naming the field of config.json."""
        super().__init__()
        config, shape = context.hf_config, self.read_shape(context.hf_config)
        size = shape.hidden_size
        factory_kwargs = {"dtype": context.dtype, "device": context.device}
        self.num_types = self.default_types
        if self.num_types:
            self.num_types = read_count(config, "type_vocab_size", self.default_types)
        self.embed_tokens = VocabParallelEmbedding(context, shape.vocab_size, size)
        self.embed_positions: nn.Embedding | None = None
        rotaries = make_rotaries(context, shape)
        if rotaries[0] is None:
            num_positions = self._read_positions(config)
            self.embed_positions = nn.Embedding(num_positions, size, **factory_kwargs)
        self.embed_types: nn.Embedding | None = None
        if self.num_types:
            self.embed_types = nn.Embedding(self.num_types, size, **factory_kwargs)
        self.embed_norm = shape.norm(context, size)
        self.layers = nn.ModuleList()
        for index in range(shape.num_layers):
            name = f"layers.{index}"
            attention = SelfAttention(context, f"{name}.self_attn", shape, rotaries[index], index)
            self.layers.append(PostNormBlock(context, name, shape, attention))
        self.weight_mappings = tuple(self._map_weights())

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json. Raise ModelError if it is not supported."""
        return _read_shape(config)

    @staticmethod
    def read_offset(config: Config) -> int:
        """Return the row of the position table for the first position."""
        return 0

    def _read_positions(self, config: Config) -> int:
        """Return the number of rows of the position table, and set `offset` and max_positions."""
        num_positions = read_count(config, "max_position_embeddings", 512)
        self.offset = self.read_offset(config)
        self.max_positions = num_positions - self.offset
        if self.max_positions < 1:
            raise ModelError(
                f"config.json: max_position_embeddings {num_positions} must be more than "
                f"{self.offset}"
            )
        return num_positions

    def _map_weights(self) -> list[WeightMapping]:
        mappings = []
        for prefix in self.prefixes:
            mappings += [WeightMapping(source=f"{prefix}{name}") for name in self.unused_names]
            mappings += [
                WeightMapping(source=f"{prefix}{name}", targets=(own,))
                for name, own in self.root_names.items()
            ]
            mappings += [
                WeightMapping(
                    source=f"{prefix}{name}", targets=tuple(f"layers.{{}}.{own}" for own in targets)
                )
                for name, targets in self.layer_names.items()
            ]
        return mappings

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last layer: [T, D], or only the tokens needed."""
        x_TD = self.embed_tokens(input_ids_T & ((1 << TOKEN_TYPE_BIT) - 1))
        if self.embed_types is not None:
            types_T = (input_ids_T >> TOKEN_TYPE_BIT).clamp_(max=self.num_types - 1)
            x_TD = x_TD.add_(self.embed_types(types_T))
        if self.embed_positions is not None:
            x_TD = x_TD.add_(self.embed_positions(positions_T + self.offset))
        x_TD, residual_TD = self.embed_norm(x_TD), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, positions_T, attention)
        return x_TD


class RobertaModel(BertModel):
    """RoBERTa and XLM-R: the position table starts after the row of the padding token."""

    architectures: ClassVar[tuple[str, ...]] = ("RobertaModel", "XLMRobertaModel")

    @staticmethod
    def read_offset(config: Config) -> int:
        """Return the row of the position table for the first position."""
        return read_count(config, "pad_token_id", 1, minimum=0) + 1


class BertForSequenceClassification(BertModel):
    """BERT with a classification head of two layers on the first token."""

    architectures: ClassVar[tuple[str, ...]] = ("BertForSequenceClassification",)
    prefixes: ClassVar[tuple[str, ...]] = ("bert.", "")
    head_names: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        size = self.embed_tokens.weight.shape[1]
        self.num_labels = read_num_labels(context.hf_config)
        self.dense = ClassHead(context, size, size)
        self.out_proj = ClassHead(context, size, self.num_labels)
        first, second = self.head_names
        self.weight_mappings = (
            WeightMapping(source=first, targets=("dense",)),
            WeightMapping(source=second, targets=("out_proj",)),
            *self.weight_mappings,
        )

    def classify(self, pooled_RD: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the classification head, [R, L]."""
        return self.out_proj(torch.tanh(self.dense(pooled_RD)))


class RobertaForSequenceClassification(BertForSequenceClassification):
    """RoBERTa and XLM-R with a classification head of two layers on the first token."""

    architectures: ClassVar[tuple[str, ...]] = (
        "RobertaForSequenceClassification",
        "XLMRobertaForSequenceClassification",
    )
    prefixes: ClassVar[tuple[str, ...]] = ("roberta.", "")
    head_names: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")
    read_offset = staticmethod(RobertaModel.read_offset)
