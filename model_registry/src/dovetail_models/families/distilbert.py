"""DistilBERT encoders. Source: Sanh et al. 2019, arXiv:1910.01108.

Dimensions: R results, D hidden size, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch.nn import functional

from dovetail_models.config_reader import Config, renamed
from dovetail_models.decoder import DecoderShape
from dovetail_models.encoder import Encoder
from dovetail_models.families.bert import BertForSequenceClassification, BertModel

_LAYER = {
    "attention.q_lin": "self_attn.q_proj",
    "attention.k_lin": "self_attn.k_proj",
    "attention.v_lin": "self_attn.v_proj",
    "attention.out_lin": "self_attn.o_proj",
    "sa_layer_norm": "input_layernorm",
    "ffn.lin1": "mlp.up_proj",
    "ffn.lin2": "mlp.down_proj",
    "output_layer_norm": "post_attention_layernorm",
}
_LAYER_NAMES = {f"transformer.layer.{{}}.{name}": (own,) for name, own in _LAYER.items()}
_UNUSED = ("embeddings.position_ids", "vocab_transform", "vocab_layer_norm", "vocab_projector")
_HEAD = ("pre_classifier", "classifier")


def _read_shape(config: Config) -> DecoderShape:
    """Return the shape that config.json defines, with the names of fields of DistilBERT."""
    usual = renamed(
        config,
        hidden_size="dim",
        intermediate_size="hidden_dim",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        hidden_act="activation",
    )
    return BertModel.read_shape(usual)


class DistilBertModel(BertModel):
    """A BERT without token types."""

    provides: ClassVar[frozenset[str]] = Encoder.provides
    architectures: ClassVar[tuple[str, ...]] = ("DistilBertModel",)
    prefixes: ClassVar[tuple[str, ...]] = ("", "distilbert.")
    unused_names: ClassVar[tuple[str, ...]] = (*_UNUSED, *_HEAD)
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = _LAYER_NAMES
    default_types: ClassVar[int] = 0
    read_shape = staticmethod(_read_shape)


class DistilBertForSequenceClassification(BertForSequenceClassification):
    """DistilBERT with a classification head of two layers on the first token."""

    provides: ClassVar[frozenset[str]] = Encoder.provides
    architectures: ClassVar[tuple[str, ...]] = ("DistilBertForSequenceClassification",)
    prefixes: ClassVar[tuple[str, ...]] = ("distilbert.", "")
    unused_names: ClassVar[tuple[str, ...]] = _UNUSED
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = _LAYER_NAMES
    default_types: ClassVar[int] = 0
    head_names: ClassVar[tuple[str, str]] = _HEAD
    read_shape = staticmethod(_read_shape)

    def classify(self, pooled_RD: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the classification head, [R, L]."""
        return self.out_proj(functional.relu(self.dense(pooled_RD)))
