"""Multi-head latent attention of a decoder layer.

The keys and values of all heads are projections of one latent vector per token. The cache contains
this vector and the rotary features of the keys. The key projection is applied to the queries, and
the value projection to the result, so attention reads only what is in the cache. Source:
DeepSeek-AI 2024, arXiv:2405.04434.
Dimensions: T tokens, D hidden size, H query heads, N features of a head that are not rotated, P
rotary features, V features of a value, L latent features, O = H · V, F features of any kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dovetail.interfaces.model import AttentionContext, ModelContext
from dovetail.interfaces.ops import LatentWeights
from dovetail_models.decoder.attention import AttentionBranch
from dovetail_models.decoder.shape import DecoderShape, MakeAttention
from dovetail_torch.distributed.shard import Shard, unsharded
from dovetail_torch.layers import (
    ColumnParallelLinear,
    HeadShape,
    LatentAttention,
    ParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
)

_EPS = 1e-6
"""Epsilon of the norms of latent vectors, which ignore the epsilon in config.json."""


@dataclass(frozen=True, kw_only=True)
class LatentOptions:
    """The sizes of latent attention.

    num_heads: the number of query heads. query_rank: features of the latent vector of queries; 0 if
    queries are projected directly. rank: L. plain_size: N. rotary_dim: P. value_size: V. scale: the
    attention-score multiplier. bias: whether the first projections and the last one have a bias.
    """

    num_heads: int
    query_rank: int
    rank: int
    plain_size: int
    rotary_dim: int
    value_size: int
    scale: float
    bias: bool = False

    @property
    def heads(self) -> HeadShape:
        """The heads of attention: one key of L + P features per token."""
        size = self.rank + self.rotary_dim
        return HeadShape(num_heads=self.num_heads, num_kv_heads=1, head_size=size)


class LatentSelfAttention(AttentionBranch):
    """Attention over latent vectors. Ranks shard the heads, but each has all latent vectors.

    rotary: the rotary embedding, shared by all layers. index: the index of the layer.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        rotary: RotaryEmbedding,
        place: tuple[int, LatentOptions],
    ) -> None:
        """place: the index of the layer, and the options."""
        super().__init__()
        index, options = place
        self.options, self.rotary = options, rotary
        num_heads, hidden_size = options.num_heads, shape.hidden_size
        latent_size = options.rank + options.rotary_dim
        query_size = num_heads * (options.plain_size + options.rotary_dim)
        self.k_b_proj = LatentHeads(context, f"{name}.k_b_proj", options, options.plain_size)
        self.v_b_proj = LatentHeads(context, f"{name}.v_b_proj", options, options.value_size)
        if options.query_rank:
            # Both projections have the same input and are replicated on all ranks.
            sizes = {"q_a_proj": options.query_rank, "kv_a_proj_with_mqa": latent_size}
            self.qkv_a_proj = ParallelLinear(
                context, f"{name}.qkv_a_proj", hidden_size, sizes, bias=options.bias
            )
            self.q_a_layernorm = RMSNorm(context, options.query_rank, _EPS)
            self.q_b_proj = ColumnParallelLinear(
                context, f"{name}.q_b_proj", options.query_rank, query_size
            )
        else:
            self.kv_a_proj_with_mqa = ParallelLinear(
                context,
                f"{name}.kv_a_proj_with_mqa",
                unsharded(hidden_size),
                {"kv_a_proj_with_mqa": latent_size},
                bias=options.bias,
            )
            self.q_proj = ColumnParallelLinear(context, f"{name}.q_proj", hidden_size, query_size)
        self.kv_a_layernorm = RMSNorm(context, options.rank, _EPS)
        self.ops = context.ops
        self.o_proj = RowParallelLinear(
            context,
            f"{name}.o_proj",
            num_heads * options.value_size,
            hidden_size,
            bias=options.bias,
        )
        self.attn = LatentAttention(
            options.heads, index, value_size=options.rank, scale=options.scale
        )

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the attention of the heads, [T, O], before `o_proj`."""
        q_THF, latent_TF = self.project(x_TD)
        rotary_args = self.rotary.at(positions_T)
        weights = LatentWeights(
            norm_L=self.kv_a_layernorm.weight,
            eps=self.kv_a_layernorm.eps,
            key_HNL=self.k_b_proj.heads(),
        )
        q_THF, k_T1F = self.ops.latent_inputs(
            q_THF, latent_TF, weights, positions_T, rotary_args.cos_sin_PR
        )
        rank = self.options.rank
        attended = self.attn(q_THF, k_T1F, k_T1F[..., :rank], attention)
        heads_THL = attended.unflatten(-1, (-1, rank))
        return self.ops.head_linear(heads_THL, self.v_b_proj.heads()).flatten(1)

    def project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries of this rank, [T, H, N + P], and the latent vectors, [T, L + P]."""
        options = self.options
        latent_size = options.rank + options.rotary_dim
        if options.query_rank:
            both_TS = self.qkv_a_proj(x_TD)
            q_TS, latent_TS = both_TS.split([options.query_rank, latent_size], dim=-1)
            q_TS = self.q_b_proj(self.q_a_layernorm(q_TS))
        else:
            q_TS, latent_TS = self.q_proj(x_TD), self.kv_a_proj_with_mqa(x_TD)
        return q_TS.unflatten(-1, (-1, options.plain_size + options.rotary_dim)), latent_TS


class LatentHeads(nn.Module):
    """A projection of latent vectors to F features of each head. Never quantized.

    weight: [H · F, L], of this rank's heads. shards: this rank's part of it; read by the
    weight loader. Raises ConfigError if the heads cannot be sharded evenly.
    """

    def __init__(
        self, context: ModelContext, name: str, options: LatentOptions, num_features: int
    ) -> None:
        """num_features: F."""
        super().__init__()
        self.num_features = num_features
        own = options.heads.share(context.ranks, name).num_heads
        shard = Shard(
            start=context.ranks.rank * own * num_features,
            size=own * num_features,
            whole=options.num_heads * num_features,
        )
        self.shards = {"weight": shard}
        weight = torch.empty(shard.size, options.rank, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def heads(self) -> torch.Tensor:
        """Return the weight of each head, [H, F, L]."""
        return self.weight.unflatten(0, (-1, self.num_features))


def latent_attention(options: LatentOptions) -> MakeAttention:
    """Return a factory for `LatentSelfAttention` for `DecoderShape.make_attention`."""

    def make(
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        rotary: RotaryEmbedding | None,
        index: int,
    ) -> LatentSelfAttention:
        assert rotary is not None, "latent attention has rotary positions"
        return LatentSelfAttention(context, name, shape, rotary, (index, options))

    return make
