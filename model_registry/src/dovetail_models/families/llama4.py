"""Llama 4, the language model. Source: Meta 2025, "The Llama 4 herd", and its reference code.

Dimensions: T tokens, D hidden size, O features of all query heads, H query heads, K key-value
heads, S head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dovetail.errors import ModelError
from dovetail.interfaces.model import AttentionContext, ModelContext
from dovetail.interfaces.ops import ExpertRouting
from dovetail.value_checks import shorten
from dovetail_models.config_reader import (
    Config,
    read_count,
    read_flag,
    read_num_layers,
    read_number,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    ExpertOptions,
    GatedMLP,
    SelfAttention,
    read_decoder_shape,
    read_heads,
    read_num_experts,
    read_rope,
    read_rotary_layers,
    read_top_k,
    rms_norm,
    sparse_mlp,
)
from dovetail_models.decoder.names import LAYER, at_layer, rotary_pairs, stacked_experts
from dovetail_models.decoder.shape import MakeAttention
from dovetail_models.sliding_windows import check_layer_types
from dovetail_torch.layers import ChunkedAttention, RotaryEmbedding


class Llama4ForCausalLM(DecoderForCausalLM):
    """Llama 4: chunked attention with RoPE or full attention per layer; one expert per token."""

    architectures: ClassVar[tuple[str, ...]] = ("Llama4ForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {
        "num_local_experts": 4,
        "intermediate_size_mlp": 40,
        "head_dim": 16,
    }

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        heads, num_experts = read_heads(config, head_size=128), read_num_experts(config, 16)
        inner, bias = read_count(config, "intermediate_size"), read_flag(config, "attention_bias")
        experts = ExpertOptions(
            num_experts=num_experts,
            intermediate_size=inner,
            routing=ExpertRouting(top_k=read_top_k(config, num_experts, 1), scores="sigmoid"),
            router_name="router",
            shared_size=inner,
            scales_input=True,
        )
        mlp, sparse = sparse_mlp(experts), _read_expert_layers(config)
        is_rotary = read_rotary_layers(config)
        rope = read_rope(config, heads.head_size, theta=500_000.0, whole_heads=True)
        eps = read_number(config, "rms_norm_eps", 1e-5)
        return read_decoder_shape(
            config,
            heads=heads,
            intermediate_size=read_count(config, "intermediate_size_mlp", 16384),
            norm=rms_norm(eps),
            ropes=tuple(rope if rotary else None for rotary in is_rotary),
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias),
            make_attention=_make_attention(
                _read_attention(config, eps), _read_chunks(config, is_rotary)
            ),
            num_experts=num_experts,
            mlps=tuple(mlp if has_experts else GatedMLP for has_experts in sparse),
            mappings=(
                *stacked_experts(f"{LAYER}.feed_forward.experts", num_experts, transposed=True),
                *at_layer(LAYER, {"feed_forward": "mlp"}),
                *rotary_pairs(heads.head_size, heads.head_size),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Llama4Options:
    """The options of Llama 4's attention layers.

    qk_norm: whether layers with rotary positions divide each head of q and k by its root mean
    square. eps: the epsilon of this norm. tunes: whether layers without rotary positions multiply
    queries by a factor that grows with the position p, 1 + tuning · ln(1 + floor((p + 1) /
    floor_scale)).
    Source: Nakanishi 2025, arXiv:2501.19399.
    """

    qk_norm: bool
    eps: float
    tunes: bool
    tuning: float
    floor_scale: int


class Llama4Attention(SelfAttention):
    """Attention whose queries and keys are rotated and normalized, or whose queries are scaled.

    chunk_size: the size of `ChunkedAttention`; 0 for full attention.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        rotary: RotaryEmbedding | None,
        place: tuple[int, int, Llama4Options],
    ) -> None:
        """place: the index of the layer, its chunk size, and the options."""
        index, chunk_size, options = place
        super().__init__(context, name, shape, rotary, index)
        self.options = options
        if chunk_size:
            self.attn = ChunkedAttention(shape.heads, index, chunk_size=chunk_size)

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the attention of the heads, [T, O], before `o_proj`."""
        q_THS, k_TKS, v_TKS = self.project(x_TD)
        if self.rotary is not None:
            q_THS, k_TKS = self.rotary(q_THS, k_TKS, positions_T)
            if self.options.qk_norm:
                q_THS, k_TKS = self._normal(q_THS), self._normal(k_TKS)
        elif self.options.tunes:
            q_THS = q_THS * self._temperature(positions_T).to(q_THS.dtype)
        return self.attn(q_THS, k_TKS, v_TKS, attention)

    def _normal(self, x_THS: torch.Tensor) -> torch.Tensor:
        """Return each head of `x_THS`, divided by its root mean square."""
        x = x_THS.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.options.eps)
        return (x * scale).to(x_THS.dtype)

    def _temperature(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the multiplier of the queries of each token, [T, 1, 1]."""
        steps_T = ((positions_T + 1) // self.options.floor_scale).float()
        return (steps_T.log1p() * self.options.tuning + 1)[:, None, None]


def _make_attention(options: Llama4Options, chunks: tuple[int, ...]) -> MakeAttention:
    def make(
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        rotary: RotaryEmbedding | None,
        index: int,
    ) -> Llama4Attention:
        return Llama4Attention(context, name, shape, rotary, (index, chunks[index], options))

    return make


def _read_attention(config: Config, eps: float) -> Llama4Options:
    return Llama4Options(
        qk_norm=read_flag(config, "use_qk_norm", default=True),
        eps=eps,
        tunes=read_flag(config, "attn_temperature_tuning", default=True),
        tuning=read_number(config, "attn_scale", 0.1),
        floor_scale=read_count(config, "floor_scale", 8192),
    )


def _read_chunks(config: Config, is_rotary: list[bool]) -> tuple[int, ...]:
    """Return the chunk size of each layer, 0 for full attention."""
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["chunked_attention" if rotary else "full_attention" for rotary in is_rotary]
    check_layer_types(kinds, len(is_rotary), "chunked_attention")
    if "chunked_attention" in kinds and config.get("attention_chunk_size", 0) is None:
        raise ModelError(
            "config.json: attention_chunk_size is null, but layers have chunked_attention; it must "
            "be a number of tokens"
        )
    size = read_count(config, "attention_chunk_size", 8192)
    return tuple(size if kind == "chunked_attention" else 0 for kind in kinds)


def _read_expert_layers(config: Config) -> list[bool]:
    """Return whether each layer has experts, from moe_layers or interleave_moe_layer_step."""
    num_layers, stated = read_num_layers(config), config.get("moe_layers")
    step = read_count(config, "interleave_moe_layer_step", 1)
    if stated is None:
        return [number % step == 0 for number in range(1, num_layers + 1)]
    is_list = isinstance(stated, list | tuple) and all(type(index) is int for index in stated)
    if not is_list or not all(0 <= index < num_layers for index in stated):
        raise ModelError(
            f"config.json: moe_layers is {shorten(stated)}; it must be a list of layer indices, "
            f"from 0 to {num_layers - 1}"
        )
    return [index in stated for index in range(num_layers)]
