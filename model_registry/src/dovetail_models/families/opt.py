"""OPT. Source: Zhang et al. 2022, arXiv:2205.01068.

Dimensions: T tokens, S sampled positions, E size of the embeddings, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from dovetail.interfaces.model import AttentionContext, ModelContext, WeightMapping
from dovetail_models.config_reader import Config, read_choice, read_count, read_flag
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    PlainMLP,
    PositionDecoder,
    PostNormBlock,
    PreNormBlock,
    layer_norm,
    read_decoder_shape,
)
from dovetail_models.decoder.names import at_layer, at_root
from dovetail_torch.layers import ParallelLinear, ParallelLMHead, VocabParallelEmbedding

NAMES = {
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn": "self_attn",
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}


class OPTDecoder(PositionDecoder):
    """The decoder of OPT. Positions start at row 2.

    OPT-350m projects its embeddings, without a last norm.
    """

    offset: ClassVar[int] = 2

    def __init__(self, context: ModelContext, shape: DecoderShape, num_positions: int) -> None:
        super().__init__(context, shape, num_positions)
        embedding_size = read_count(context.hf_config, "word_embed_proj_dim", shape.hidden_size)
        self.project_in = self.project_out = nn.Identity()
        if embedding_size != shape.hidden_size:
            sizes = (embedding_size, shape.hidden_size)
            self.embed_tokens = VocabParallelEmbedding(context, shape.vocab_size, sizes[0])
            self.project_in = _linear(context, "model.project_in", *sizes)
            self.project_out = _linear(context, "model.project_out", *sizes[::-1])
        if shape.block is PostNormBlock or read_flag(context.hf_config, "_remove_final_layer_norm"):
            self.norm = _Sum()

    def embed(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, a new tensor [T, D]."""
        x_TD = self.project_in(self.embed_tokens(input_ids_T))
        return x_TD + self.embed_positions(positions_T + self.offset)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states, [T, E], or only the tokens needed."""
        return self.project_out(super().forward(input_ids_T, positions_T, attention))


class OPTForCausalLM(DecoderForCausalLM):
    """OPT: learned positions, layer norms, ReLU. The norms are before or after the branches."""

    architectures: ClassVar[tuple[str, ...]] = ("OPTForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"ffn_dim": 128}

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "enable_bias", default=True)
        affine = read_flag(config, "layer_norm_elementwise_affine", default=True)
        is_pre_norm = read_flag(config, "do_layer_norm_before", default=True)
        return read_decoder_shape(
            config,
            intermediate_size=read_count(config, "ffn_dim"),
            rope=None,
            norm=layer_norm(1e-5, has_weight=affine, has_bias=affine),
            activation=read_choice(config, "activation_function", ("relu", "gelu")),
            tied=read_flag(config, "tie_word_embeddings", default=True),
            block=PreNormBlock if is_pre_norm else PostNormBlock,
            mlp=PlainMLP,
            mlp_bias=bias,
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias),
        )

    def make_decoder(self, context: ModelContext, shape: DecoderShape) -> OPTDecoder:
        """Return the decoder with its position table."""
        self.max_positions = read_count(context.hf_config, "max_position_embeddings", 2048)
        return OPTDecoder(context, shape, self.max_positions)

    def make_head(self, context: ModelContext, shape: DecoderShape) -> ParallelLMHead:
        """Return the LM head, whose input has the size of the embeddings."""
        size = self.model.embed_tokens.weight.shape[1]
        tied_to = self.model.embed_tokens if shape.tied else None
        return ParallelLMHead(context, "lm_head", shape.vocab_size, size, tied_to=tied_to)

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings. The first checkpoints have no prefix "model."."""
        mappings: list[WeightMapping] = []
        for decoder in ("model.decoder", "decoder"):
            names = {"final_layer_norm": "norm"}
            names |= {
                name: name
                for name in ("embed_tokens", "embed_positions", "project_in", "project_out")
            }
            mappings += at_layer(f"{decoder}.layers.{{}}", NAMES)
            mappings += at_root({f"{decoder}.{a}": f"model.{b}" for a, b in names.items()})
        return mappings


class _Sum(nn.Module):
    """A module that is used in place of a norm and only adds the residual."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the argument."""
        return x_TD

    def add(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum in place of both results of `Norm.add`."""
        sum_TD = residual_TD.add_(x_TD)
        return sum_TD, sum_TD


def _linear(context: ModelContext, name: str, in_size: int, out_size: int) -> ParallelLinear:
    """Return a linear layer that is not sharded."""
    return ParallelLinear(context, name, in_size, {name.rpartition(".")[2]: out_size})
