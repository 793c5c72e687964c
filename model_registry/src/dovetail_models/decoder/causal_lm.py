"""Dense decoders: embedding, layers, last norm and head.

A family defines `read_shape`, and its names in checkpoints if they differ from those of Llama. This
module does not depend on requests, KV-cache blocks or devices.

Dimensions: T tokens, S sampled positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from dovetail.interfaces.model import AttentionContext, ModelContext, WeightMapping
from dovetail_models.config_reader import Config
from dovetail_models.decoder.attention import SelfAttention
from dovetail_models.decoder.blocks import PreNormBlock, add
from dovetail_models.decoder.shape import DecoderShape, Rope
from dovetail_torch.layers import ParallelLMHead, RotaryEmbedding, VocabParallelEmbedding


class Decoder(nn.Module):
    """Embedding, layers and last norm: the part that checkpoints call "model"."""

    def __init__(self, context: ModelContext, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(context, shape.vocab_size, shape.hidden_size)
        self.ops, self.embedding_scale = context.ops, shape.embedding_scale
        self.layers = nn.ModuleList()
        rotaries = make_rotaries(context, shape)
        for index in range(shape.num_layers):
            name = f"model.layers.{index}"
            make = shape.make_attention or SelfAttention
            self_attn = make(context, f"{name}.self_attn", shape, rotaries[index], index)
            block_cls = shape.block or PreNormBlock
            self.layers.append(block_cls(context, name, shape, self_attn))
        self.norm = shape.norm(context, shape.hidden_size)

    def embed(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, a new tensor [T, D]."""
        x_TD = self.embed_tokens(input_ids_T)
        return x_TD if self.embedding_scale == 1 else self.ops.scale(x_TD, self.embedding_scale)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm: [T, D], or only the tokens needed."""
        x_TD, residual_TD = self.embed(input_ids_T, positions_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, positions_T, attention)
        hidden_TD, _ = add(self.norm, x_TD, residual_TD)
        return hidden_TD


class EmbeddingNormDecoder(Decoder):
    """A decoder with a norm after the embedding."""

    def __init__(self, context: ModelContext, shape: DecoderShape) -> None:
        super().__init__(context, shape)
        self.embed_norm = shape.norm(context, shape.hidden_size)

    def embed(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, a new tensor [T, D]."""
        return self.embed_norm(super().embed(input_ids_T, positions_T))


class PositionDecoder(Decoder):
    """A decoder with a table of learned positions, which are added to the embeddings.

    offset: index of the row of the first position.
    """

    offset: ClassVar[int] = 0

    def __init__(self, context: ModelContext, shape: DecoderShape, num_positions: int) -> None:
        super().__init__(context, shape)
        factory_kwargs = {"dtype": context.dtype, "device": context.device}
        num_rows = num_positions + self.offset
        self.embed_positions = nn.Embedding(num_rows, shape.hidden_size, **factory_kwargs)

    def embed(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, a new tensor [T, D]."""
        x_TD = super().embed(input_ids_T, positions_T)
        return x_TD.add_(self.embed_positions(positions_T + self.offset))


def make_rotaries(context: ModelContext, shape: DecoderShape) -> list[RotaryEmbedding | None]:
    """Return the rotary embedding of each layer. Layers with the same angles share it."""
    made: list[tuple[Rope, RotaryEmbedding]] = []
    rotaries: list[RotaryEmbedding | None] = []
    for rope in shape.ropes:
        if rope is None:
            rotaries.append(None)
            continue
        same = next((rotary for other, rotary in made if other == rope), None)
        if same is None:
            same = RotaryEmbedding(
                context,
                shape.heads.head_size,
                rotary_dim=rope.rotary_dim,
                parameters=rope.parameters,
            )
            made.append((rope, same))
        rotaries.append(same)
    return rotaries


class DecoderForCausalLM(nn.Module, ABC):
    """Implements the model contract for a decoder. Subclasses define `read_shape`.

    Supports tensor parallelism: the layers shard every size over the ranks.
    """

    CONTRACT: ClassVar[str] = "model"
    CONTRACT_VERSION: ClassVar[str] = "0.10"
    provides: ClassVar[frozenset[str]] = frozenset({"tensor_parallel"})
    architectures: ClassVar[tuple[str, ...]]

    def __init__(self, context: ModelContext) -> None:
        """Create the modules with uninitialized parameters.

        Raises ModelError, which names the field, if a field of config.json is invalid.
        """
        super().__init__()
        shape = self.read_shape(context.hf_config)
        self.weight_mappings = tuple(self.map_weights(shape))
        self.model = self.make_decoder(context, shape)
        self.lm_head = self.make_head(context, shape)
        self.ops = context.ops
        self.logit_scale, self.logit_cap = shape.logit_scale, shape.logit_cap

    @staticmethod
    @abstractmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json. Raise ModelError if it is not supported."""

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the names and layouts of the checkpoint that differ from the modules'."""
        return shape.mappings

    def make_decoder(self, context: ModelContext, shape: DecoderShape) -> Decoder:
        """Return the decoder; a family with other inputs than token embeddings overrides it."""
        return Decoder(context, shape)

    def make_head(self, context: ModelContext, shape: DecoderShape) -> ParallelLMHead:
        """Return the head."""
        return ParallelLMHead(
            context,
            "lm_head",
            shape.vocab_size,
            shape.hidden_size,
            tied_to=self.model.embed_tokens if shape.tied else None,
            bias=shape.head_bias,
        )

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm: [T, D], or only the tokens needed.

        input_ids_T, positions_T: int64.
        """
        return self.model(input_ids_T, positions_T, attention)

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits, [S, V], in the dtype of the LM head's outputs."""
        logits_SV = self.lm_head(hidden_SD)
        if self.logit_scale != 1:
            logits_SV = self.ops.scale(logits_SV, self.logit_scale)
        if self.logit_cap:
            logits_SV = self.ops.soft_cap(logits_SV, self.logit_cap)
        return logits_SV
