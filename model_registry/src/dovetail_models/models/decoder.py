"""The decoder of Llama and similar architectures: pre-norm, rotary attention, gated MLP.

x ← x + Attention(RMSNorm(x));  x ← x + MLP(RMSNorm(x));  then a last norm and the head.
Architectures differ in the result of `read_shape` and in the attention class. Modules are named so
that their parameters have the checkpoint's names. Does not depend on requests, blocks or devices.

Dimensions: T tokens, S sampled positions, D hidden size, O features of the fused projection, H
query heads, K key-value heads, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import AttentionContext, ModelContext
from dovetail_models.config_reader import (
    Config,
    read_choice,
    read_count,
    read_flag,
    read_num_layers,
    read_number,
)
from dovetail_torch.layers import (
    Attention,
    HeadShape,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
)
from dovetail_torch.layers.rope_frequencies import read_rope_parameters

MAX_HEAD_SIZE = 2**13
"""The maximum head size. The largest heads of known models have 512 features, so a larger size is
treated as an error in the file."""
SILU_NAMES = ("silu", "swish")
"""The names of x · sigmoid(x) in the table ACT2FN of transformers."""


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder.

    windows: the sliding window of each layer in tokens, including the current one; 0 for full
    attention. *_bias: whether these linear layers have a bias.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: HeadShape
    windows: tuple[int, ...]
    norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.windows)


def read_decoder_shape(
    config: Config,
    *,
    windows: tuple[int, ...] = (),
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> DecoderShape:
    """Return the shape defined by config.json. windows: () for full attention in all layers.

    Raises ModelError, naming the field, for a value that is absent, invalid or not supported.
    """
    read_choice(config, "hidden_act", SILU_NAMES)
    return DecoderShape(
        vocab_size=read_count(config, "vocab_size"),
        hidden_size=read_count(config, "hidden_size"),
        intermediate_size=read_count(config, "intermediate_size"),
        heads=_read_heads(config),
        windows=windows or (0,) * read_num_layers(config),
        norm_eps=read_number(config, "rms_norm_eps", 1e-6),
        tied=read_flag(config, "tie_word_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
    )


def _read_heads(config: Config) -> HeadShape:
    hidden_size = read_count(config, "hidden_size")
    num_heads = read_count(config, "num_attention_heads")
    num_kv_heads = read_count(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}, and head_dim is absent"
        )
    head_size = read_count(config, "head_dim", hidden_size // num_heads)
    if head_size > MAX_HEAD_SIZE:
        raise ModelError(
            f"config.json: the head size is {head_size} (head_dim, or hidden_size {hidden_size} / "
            f"num_attention_heads {num_heads}); at most {MAX_HEAD_SIZE} is supported"
        )
    return HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)


def make_rotary(context: ModelContext, head_size: int) -> RotaryEmbedding:
    """Return a rotary embedding that rotates all features of a head.

    As in transformers, rope type "default" ignores partial_rotary_factor. Other rope types would
    rotate a part of each head, which these architectures do not support: raises ModelError.
    """
    parameters = read_rope_parameters(context.hf_config)
    share = parameters["partial_rotary_factor"]
    if parameters["rope_type"] != "default" and int(head_size * share) != head_size:
        raise ModelError(
            f"config.json: partial_rotary_factor is {share!r} with rope type "
            f"{parameters['rope_type']!r}, but this architecture rotates whole heads: remove "
            "partial_rotary_factor"
        )
    return RotaryEmbedding(context, head_size, rotary_size=head_size)


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions. Source: Ainslie et al. 2023, 2305.13245.

    rotary: the rotary embedding, shared by all layers. index: the number of the layer.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        rotary: RotaryEmbedding,
        index: int,
    ) -> None:
        super().__init__()
        heads = shape.heads
        self.qkv_proj = QKVParallelLinear(
            context, f"{name}.qkv_proj", shape.hidden_size, heads, bias=shape.qkv_bias
        )
        self.o_proj = RowParallelLinear(
            context,
            f"{name}.o_proj",
            heads.num_heads * heads.head_size,
            shape.hidden_size,
            bias=shape.output_bias,
        )
        self.rotary = rotary
        self.attn = Attention(heads, index, sliding_window=shape.windows[index])

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the attention of the heads, [T, H·D], before `o_proj`."""
        q_THD, k_TKD, v_TKD = self.project(x_TD)
        return self.attn(q_THD, k_TKD, v_TKD, attention, self.rotary.at(positions_T))

    def project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q [T, H, D], k and v [T, K, D], before the rotary embedding."""
        return self.qkv_proj.split(self.qkv_proj(x_TD))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)). Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, context: ModelContext, name: str, shape: DecoderShape) -> None:
        super().__init__()
        inner, bias = shape.intermediate_size, shape.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            context,
            f"{name}.gate_up_proj",
            shape.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            bias=bias,
        )
        self.act_fn = SiluAndMul(context)
        self.down_proj = RowParallelLinear(
            context, f"{name}.down_proj", inner, shape.hidden_size, bias=bias
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP, [T, D]."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x_TD)))


class DecoderLayer(nn.Module):
    """One decoder layer. It returns the MLP's output and the residual. The next norm adds them."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        self_attn: DecoderAttention,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.is_last = self_attn.attn.index == shape.num_layers - 1
        self.mlp = GatedMLP(context, f"{name}.mlp", shape)
        self.input_layernorm = RMSNorm(context, shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(context, shape.hidden_size, shape.norm_eps)

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        positions_T: torch.Tensor,
        attention: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's output and the residual to add it to.

        In the first layer `residual_TD` is None and x becomes the residual. After its attention
        the last layer computes only the tokens that are still needed.
        """
        if residual_TD is None:
            x_TD, residual_TD = self.input_layernorm(x_TD), x_TD
        else:
            x_TD, residual_TD = self.input_layernorm.add(x_TD, residual_TD)
        attended_TO = self.self_attn(x_TD, positions_T, attention)
        if self.is_last:
            attended_TO, residual_TD = attention.narrow(attended_TO), attention.narrow(residual_TD)
        x_TD = self.self_attn.o_proj(attended_TO)
        x_TD, residual_TD = self.post_attention_layernorm.add(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class Decoder(nn.Module):
    """Embedding, layers and last norm: the part that checkpoints call "model"."""

    def __init__(
        self, context: ModelContext, shape: DecoderShape, attention_cls: type[DecoderAttention]
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(context, shape.vocab_size, shape.hidden_size)
        rotary = make_rotary(context, shape.heads.head_size)
        self.layers = nn.ModuleList()
        for index in range(shape.num_layers):
            name = f"model.layers.{index}"
            self_attn = attention_cls(context, f"{name}.self_attn", shape, rotary, index)
            self.layers.append(DecoderLayer(context, name, shape, self_attn))
        self.norm = RMSNorm(context, shape.hidden_size, shape.norm_eps)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm: [T, D], or only the tokens needed."""
        x_TD, residual_TD = self.embed_tokens(input_ids_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, positions_T, attention)
        hidden_TD, _ = self.norm.add(x_TD, residual_TD)
        return hidden_TD


class DecoderForCausalLM(nn.Module, ABC):
    """Implements the model contract for a decoder. Subclasses define `read_shape`.

    Supports tensor parallelism: the layers divide every size among the ranks.
    attention_cls: the attention class of all layers.
    """

    CONTRACT: ClassVar[str] = "model"
    CONTRACT_VERSION: ClassVar[str] = "0.5"
    provides: ClassVar[frozenset[str]] = frozenset({"tensor_parallel"})
    architectures: ClassVar[tuple[str, ...]]
    attention_cls: ClassVar[type[DecoderAttention]] = DecoderAttention

    def __init__(self, context: ModelContext) -> None:
        """Create the modules with uninitialized parameters.

        Raises ModelError, naming the field of config.json.
        """
        super().__init__()
        shape = self.read_shape(context.hf_config)
        self.model = Decoder(context, shape, self.attention_cls)
        self.lm_head = ParallelLMHead(
            context,
            "lm_head",
            shape.vocab_size,
            shape.hidden_size,
            tied_to=self.model.embed_tokens if shape.tied else None,
        )

    @staticmethod
    @abstractmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json. Raise ModelError if it is not supported."""

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm: [T, D], or only the tokens needed.

        input_ids_T, positions_T: int64.
        """
        return self.model(input_ids_T, positions_T, attention)

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits, [S, V], in the model's dtype."""
        return self.lm_head(hidden_SD)
