"""The attention layer of a model: its parameters, and a call to the step's attention context.

It does not depend on a cache, block tables or a backend: the runner reads its parameters, creates
the backend's layer and calls it in `AttentionContext.attend`. The sizes that a model passes are
those of the whole model; if ranks share it, `replicate_kv_heads` reduces each layer to the rank's
heads. Dimensions: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from dovetail.errors import ContractError
from dovetail.interfaces.attention import AttentionFacts, RotaryArgs
from dovetail.interfaces.model import AttentionContext, RankGroup
from dovetail_torch.distributed.shard import Shard
from dovetail_torch.layers.linear import HeadShape
from dovetail_torch.layers.state import StateLayer


class Attention(nn.Module):
    """Causal attention over all previous tokens of the row.

    index: index of the layer, from 0 in the order of creation; set by the model. scale: the
    attention-score multiplier; 0 for head_size ** -0.5. sliding_window: number of tokens that a
    token sees, including itself; 0 for all.
    soft_cap: c in c·tanh(score / c); 0 for none.
    alibi_slopes: the slope of each query head for a bias of the scores, slope · (position of the
    key - position of the query); () for none. Source: Press et al. 2022, arXiv:2108.12409.
    sinks: float32 [H], an additional logit for each query head, or None; the layer's only
    parameter. Raises ContractError for another shape or dtype.
    value_size: see `LatentAttention`; 0 for values of head_size features.
    chunk_size: see `ChunkedAttention`; 0 for none.
    kv_scales: float32 [2], the scales of the keys and of the values in the cache; None without
    per-layer scales. A weight loader fills it if the checkpoint has them.
    shards: this rank's part of the sinks, for weight loaders; {} for all.
    """

    shards: Mapping[str, Shard]
    bidirectional: ClassVar[bool] = False
    value_size: int = 0
    chunk_size: int = 0
    kv_scales: torch.Tensor | None

    def __init__(
        self,
        heads: HeadShape,
        index: int,
        *,
        scale: float = 0.0,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        alibi_slopes: Sequence[float] = (),
        sinks: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        if sinks is not None and (sinks.dtype, len(sinks)) != (torch.float32, heads.num_heads):
            raise ContractError(
                f"attention layer {index} has sinks with dtype {sinks.dtype} and shape "
                f"{list(sinks.shape)}; use float32, with one sink for each of {heads.num_heads} "
                f"heads"
            )
        self.heads = heads
        self.index = index
        self.scale = scale or heads.head_size**-0.5
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        if alibi_slopes and len(alibi_slopes) != heads.num_heads:
            raise ContractError(
                f"attention layer {index} has {len(alibi_slopes)} ALiBi slopes for "
                f"{heads.num_heads} heads; use one slope for each head"
            )
        self.alibi_slopes = tuple(alibi_slopes)
        self.sinks = sinks
        self.shards = {}
        self.register_buffer("kv_scales", None, persistent=False)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.heads.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.heads.num_kv_heads

    @property
    def head_size(self) -> int:
        """Number of features per head."""
        return self.heads.head_size

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        attention: AttentionContext,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Return the attention of the tokens, [T, H·D]. D is the size of a value.

        Inputs may be views that are not contiguous.

        rotary_args: rotates q and k (`RotaryEmbedding.at`); None for no rotation.
        """
        return attention.attend(self.index, q_THD, k_TKD, v_TKD, rotary_args).flatten(-2)


class LatentAttention(Attention):
    """Attention over keys that contain their values: multi-head latent attention.

    A token's value is the first `value_size` features of its key, and only keys are cached. The
    model passes the values as views of the keys, which already have their positions.
    Source: DeepSeek-AI 2024, arXiv:2405.04434.
    """

    def __init__(
        self, heads: HeadShape, index: int, *, value_size: int, scale: float = 0.0
    ) -> None:
        """Create the layer. Raise ContractError if the values are not parts of the keys."""
        super().__init__(heads, index, scale=scale)
        if not 0 < value_size <= heads.head_size:
            raise ContractError(
                f"attention layer {index} has values of {value_size} features in keys of "
                f"{heads.head_size}; a value must be a part of its key"
            )
        self.value_size = value_size


class ChunkedAttention(Attention):
    """Attention within chunks: a token sees the previous tokens of its own chunk, and itself.

    Position p is in chunk p // chunk_size. Blocks of earlier chunks are freed. The runner splits
    the runs of a step at the boundaries of chunks, so every attention backend can compute such a
    layer.
    Source: the reference code of Llama 4 (Meta 2025).
    """

    def __init__(self, heads: HeadShape, index: int, *, chunk_size: int) -> None:
        """Create the layer. Raise ContractError if `chunk_size` is not positive."""
        super().__init__(heads, index)
        if chunk_size < 1:
            raise ContractError(
                f"attention layer {index} has chunks of {chunk_size} tokens; use at least 1"
            )
        self.chunk_size = chunk_size


class BidirectionalAttention(Attention):
    """Attention over all tokens of a prompt, which is computed in one step, without a cache.

    With a sliding window, a token sees the tokens at a distance below the window.
    """

    bidirectional: ClassVar[bool] = True


CacheLayer = Attention | StateLayer
"""A layer that stores data of each request: keys and values, or a state."""


def cache_layers(model: nn.Module) -> tuple[tuple[str, CacheLayer], ...]:
    """Return the model's attention layers and recurrent layers; the n-th layer has index n.

    Raises ContractError if the model used an index twice or omitted one.
    """
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Attention | StateLayer)
    ]
    layers.sort(key=lambda pair: pair[1].index)
    indices = [layer.index for _, layer in layers]
    if indices != list(range(len(layers))):
        raise ContractError(
            f"{type(model).__name__} assigns to its {len(layers)} attention layers and recurrent "
            f"layers the indices {indices}: they must be unique, from 0 to {len(layers) - 1}"
        )
    return tuple(layers)


def attention_layers(model: nn.Module) -> tuple[tuple[str, Attention], ...]:
    """Return the model's attention layers by name, in the order of their indices.

    Raises ContractError like `cache_layers`.
    """
    return tuple(
        (name, layer) for name, layer in cache_layers(model) if isinstance(layer, Attention)
    )


def add_kv_scales(layers: Iterable[Attention], device: torch.device) -> None:
    """Give each layer `kv_scales` of 1. Call it before weights are loaded."""
    for layer in layers:
        layer.kv_scales = torch.ones(2, dtype=torch.float32, device=device)


def attention_facts(layers: Collection[Attention]) -> AttentionFacts:
    """Return the combined requirements of a model's attention layers; there is at least one."""
    layer = next(iter(layers))
    return AttentionFacts(
        head_size=layer.head_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        sliding_window=any(other.sliding_window for other in layers),
        soft_cap=any(other.soft_cap for other in layers),
        sinks=any(other.sinks is not None for other in layers),
        alibi=any(other.alibi_slopes for other in layers),
        bidirectional=any(other.bidirectional for other in layers),
        mla=any(other.value_size for other in layers),
    )


def replicate_kv_heads(model: nn.Module, ranks: RankGroup) -> None:
    """Reduce each attention layer of `model` to the heads of this rank.

    Call it once, after creation and before weights are loaded.
    Raises ConfigError if the heads cannot be sharded evenly.
    """
    for name, layer in attention_layers(model):
        num_heads = layer.num_heads
        layer.heads = layer.heads.share(ranks, name)
        shard = Shard(start=ranks.rank * layer.num_heads, size=layer.num_heads, whole=num_heads)
        layer.alibi_slopes = layer.alibi_slopes[shard.slice]
        if layer.sinks is not None and not shard.is_whole:
            layer.sinks = nn.Parameter(layer.sinks[shard.slice].clone(), requires_grad=False)
            layer.shards = {"sinks": shard}
