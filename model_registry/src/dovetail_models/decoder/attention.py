"""Self-attention of a decoder layer.

Dimensions: T tokens, D hidden size, O features of all query heads, H query heads, K key-value
heads, S head size.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from dovetail.interfaces.model import AttentionContext, ModelContext
from dovetail_models.decoder.shape import DecoderShape
from dovetail_torch.layers import (
    Attention,
    BidirectionalAttention,
    QKVParallelLinear,
    RotaryEmbedding,
    RowParallelLinear,
)
from dovetail_torch.layers.attention import CacheLayer


class AttentionBranch(nn.Module):
    """The base class of a layer's attention. o_proj: the last projection.

    attn: the attention over the cache, or the state of the layer.
    """

    attn: CacheLayer
    o_proj: RowParallelLinear

    @abstractmethod
    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the attention of the heads, [T, O], before `o_proj`."""


class SelfAttention(AttentionBranch):
    """Grouped-query attention with the options of the shape.

    Source: Ainslie et al. 2023, arXiv:2305.13245.
    rotary: the rotary embedding, shared by all layers with the same angles, or None. index: the
    index of the layer.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        rotary: RotaryEmbedding | None,
        index: int,
    ) -> None:
        super().__init__()
        heads, options = shape.heads, shape.attention
        self.qkv_proj = QKVParallelLinear(
            context, f"{name}.qkv_proj", shape.hidden_size, heads, bias=options.qkv_bias
        )
        self.o_proj = RowParallelLinear(
            context,
            f"{name}.o_proj",
            heads.num_heads * heads.head_size,
            shape.hidden_size,
            bias=options.output_bias,
        )
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if options.qk_norm is not None:
            q_shard, k_shard, _ = self.qkv_proj.part_shards
            self.q_norm = options.qk_norm(context, q_shard, heads.head_size)
            self.k_norm = options.qk_norm(context, k_shard, heads.head_size)
        self.clip, self.clips_normal = options.clip, options.clips_normal
        self.rotary = rotary
        sinks_H = None
        if options.sinks:
            empty_H = torch.empty(heads.num_heads, dtype=torch.float32, device=context.device)
            sinks_H = nn.Parameter(empty_H, requires_grad=False)
        attention_cls = BidirectionalAttention if options.bidirectional else Attention
        self.attn = attention_cls(
            heads,
            index,
            scale=options.scale,
            sliding_window=shape.windows[index],
            soft_cap=options.soft_cap,
            alibi_slopes=options.alibi_slopes,
            sinks=sinks_H,
        )

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the attention of the heads, [T, O], before `o_proj`."""
        q_THS, k_TKS, v_TKS = self.project(x_TD)
        rotary_args = None if self.rotary is None else self.rotary.at(positions_T)
        return self.attn(q_THS, k_TKS, v_TKS, attention, rotary_args)

    def project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q [T, H, S], k and v [T, K, S], before the rotary embedding."""
        qkv_TO = self.qkv_proj(x_TD)
        if self.clip and not self.clips_normal:
            qkv_TO = qkv_TO.clamp_(-self.clip, self.clip)
        q_THS, k_TKS, v_TKS = self.qkv_proj.split(qkv_TO)
        if self.q_norm is not None and self.k_norm is not None:
            q_THS, k_TKS = self.q_norm(q_THS), self.k_norm(k_TKS)
        if self.clip and self.clips_normal:
            heads = (q_THS, k_TKS, v_TKS)
            q_THS, k_TKS, v_TKS = (each.clamp(-self.clip, self.clip) for each in heads)
        return q_THS, k_TKS, v_TKS
