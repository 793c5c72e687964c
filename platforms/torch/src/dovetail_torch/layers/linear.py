"""Linear layers: each describes itself (`LinearShape`), and the linear method does the work.

A layer knows the names of its parts in a checkpoint. It does not depend on how its weights are
loaded, stored, packed or quantized. Sizes given by models are those of the whole model. If several
ranks share it (`ModelContext.ranks`), column-parallel layers shard their output features;
row-parallel layers shard their input features and all-reduce the results. Linear methods only see
the rank's shard.
Source: Shoeybi et al. 2019, arXiv:1909.08053.
Dimensions: T tokens, I input features, O output features of all parts; of
attention: H query heads, K key-value heads, N all three parts' heads, S head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from dovetail.interfaces.linear_method import ACTIVATION, AppliesActivation, LinearShape
from dovetail.interfaces.model import ModelContext, RankGroup
from dovetail_torch.distributed.shard import Shard, cannot_shard, shard_evenly, unsharded
from dovetail_torch.layers.activation import Activation


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Numbers of query heads, key-value heads and features per head of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def share(self, ranks: RankGroup, owner: str) -> HeadShape:
        """Return the heads of one rank. Several ranks may have the same key-value head.

        owner: the layer's name. Raises ConfigError if the heads cannot be sharded evenly.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads

        def works(count: int) -> bool:
            return not (heads % count or (kv_heads % count and count % kv_heads))

        if not works(ranks.size):
            raise cannot_shard(
                f"the {heads} query heads and {kv_heads} key-value heads of {owner}", ranks, works
            )
        return HeadShape(
            num_heads=heads // ranks.size,
            num_kv_heads=max(1, kv_heads // ranks.size),
            head_size=self.head_size,
        )


@dataclass(frozen=True, kw_only=True)
class BlockWeight:
    """The rows of a part of a weight as quantized blocks.

    type_name: as in GGUF files. rows_OB: uint8, the bytes of whole blocks; rows may be strided.
    is_mapped: whether they are a private, read-only mapping of a file.
    """

    type_name: str
    rows_OB: torch.Tensor
    is_mapped: bool


class ParallelLinear(nn.Module):
    """The base of all linear layers: y = x · Wᵀ + b, computed by the context's linear method.

    name: the path of the layer in the model, "model.layers.0.mlp.down_proj".
    in_features: number of input features. parts: numbers of output features by the checkpoint's
        names for the last component of `name`, in order. Sizes are those of the unsharded
        layer. num_experts: see `LinearShape`.
    shape, linear_method: read by the weight loader and by `pack_linears`; of this rank only.
    in_shard, part_shards: the rank's shard of the input, and of each part's output. ranks: the
        group that shares the layer. elsewhere: names of parameters that exist only on other ranks.
    settled: names of parameters that are already packed; loaders skip them.
    borrows: names of parameters that the linear method reads only once: it packs them and checks
        that they are finite. A loader may provide mapped weights instead of filling them. borrowed:
        these mapped weights, by part index; the parameter's rows are then not filled.
    block_types: types of blocks that the linear method computes with, set in `create`.
        expected_blocks: block types of the parts that a loader will provide as blocks, by part
        index. blocks: these blocks; the parameter's rows are not filled.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int | Shard,
        parts: Mapping[str, int] | Mapping[str, Shard],
        *,
        bias: bool = False,
        num_experts: int = 1,
    ) -> None:
        super().__init__()
        self.linear_method, self.ranks = context.linear_method, context.ranks
        self.in_shard = _shard(in_features)
        self.part_shards = tuple(_shard(part) for part in parts.values())
        self.elsewhere: frozenset[str] = frozenset()
        self.shape = LinearShape(
            name=name,
            in_features=self.in_shard.size,
            part_names=tuple(parts),
            part_sizes=tuple(shard.size for shard in self.part_shards),
            bias=bias,
            dtype=context.dtype,
            device=context.device,
            num_experts=num_experts,
        )
        self.settled: frozenset[str] = frozenset()
        self.borrows: frozenset[str] = frozenset()
        self.borrowed: dict[int, torch.Tensor] = {}
        self.block_types: frozenset[str] = frozenset()
        self.expected_blocks: dict[int, str] = {}
        self.blocks: dict[int, BlockWeight] = {}
        self.linear_method.create(self, self.shape)

    def borrow(self, part: int, weight: torch.Tensor) -> None:
        """Use a private, read-only mapping of part `part` of the weight."""
        self.borrowed[part] = weight

    def expect_blocks(self, part: int, type_name: str) -> None:
        """Announce that the loader will provide part `part` as blocks of this type."""
        self.expected_blocks[part] = type_name

    def share_blocks(self, part: int, blocks: BlockWeight) -> None:
        """Use these quantized blocks as the weight of shard `part`, without a copy."""
        self.expect_blocks(part, blocks.type_name)
        self.blocks[part] = blocks

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, [T, O]."""
        return self.linear_method.apply(self, x_TI)

    def activated(self, x_TI: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(x · Wᵀ + b), [T, O], in one call if the linear method has one."""
        method = self.linear_method
        if ACTIVATION not in type(method).provides:
            return activation(method.apply(self, x_TI))
        fused = cast(AppliesActivation, method)
        return fused.apply_activation(self, x_TI, activation.fused_name)

    def extra_repr(self) -> str:
        """Return the sizes, for the `repr` of the module."""
        parts = ", ".join(map("{}={}".format, self.shape.part_names, self.shape.part_sizes))
        return f"in_features={self.shape.in_features}, {parts}, bias={self.shape.bias}"


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose output features are sharded over the ranks.

    Raises ConfigError if they cannot be sharded evenly.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
    ) -> None:
        parts = _divide_parts({leaf_of(name): out_features}, context, name)
        super().__init__(context, name, in_features, parts, bias=bias)


class RowParallelLinear(ParallelLinear):
    """A linear layer whose input features are sharded over the ranks.

    The results are all-reduced, so every rank returns the same output. The input is the rank's
    shard, as returned by column-parallel layers. The bias is added on rank 0. Raises ConfigError if
    the features cannot be sharded evenly.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
    ) -> None:
        in_shard = shard_evenly(
            in_features, context.ranks, f"the {in_features} input features of {name}"
        )
        has_bias = bias and context.ranks.rank == 0
        parts = {leaf_of(name): out_features}
        super().__init__(context, name, in_shard, parts, bias=has_bias)
        if bias and not has_bias:
            self.elsewhere = frozenset({"bias"})

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, [T, O], all-reduced over the ranks."""
        return self.ranks.all_reduce(self.linear_method.apply(self, x_TI))


class MergedColumnParallelLinear(ParallelLinear):
    """Several linear layers of the same input in one matrix product, with concatenated outputs.

    parts: output features by the checkpoint's names, such as {"gate_proj": 64, "up_proj": 64}; each
    part is sharded over the ranks. Raises ConfigError if a part cannot be sharded evenly.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
    ) -> None:
        shards = _divide_parts(parts, context, name)
        super().__init__(context, name, in_features, shards, bias=bias)


class QKVParallelLinear(ParallelLinear):
    """The projections q_proj, k_proj and v_proj in one matrix product. `split` separates them.

    Heads are sharded over the ranks; with fewer key-value heads than ranks, several ranks have the
    same key-value head. Raises ConfigError if they cannot be sharded evenly.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        heads: HeadShape,
        *,
        bias: bool = False,
    ) -> None:
        ranks, size = context.ranks, heads.head_size
        own = heads.share(ranks, name)
        first_kv_head = ranks.rank * heads.num_kv_heads // ranks.size
        kv_shard = Shard(
            start=first_kv_head * size,
            size=own.num_kv_heads * size,
            whole=heads.num_kv_heads * size,
        )
        q_features = own.num_heads * size
        q_shard = Shard(
            start=ranks.rank * q_features, size=q_features, whole=heads.num_heads * size
        )
        parts = {"q_proj": q_shard, "k_proj": kv_shard, "v_proj": kv_shard}
        super().__init__(context, name, hidden_size, parts, bias=bias)
        self.head_counts = (own.num_heads, own.num_kv_heads, own.num_kv_heads)
        self.head_size = size

    def split(self, qkv_TO: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rank's q [T, H, S], k [T, K, S] and v [T, K, S]: views, not contiguous.

        `qkv_TO` must be contiguous, as returned by linear methods.
        """
        heads_TNS = qkv_TO.view(-1, sum(self.head_counts), self.head_size)
        return heads_TNS.split_with_sizes(self.head_counts, dim=1)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, ParallelLinear]]:
    """Yield name and layer of each linear layer once, in the order of the model's modules."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            yield name, module


def pack_linears(model: nn.Module) -> None:
    """Let each layer's linear method pack its loaded weights. Call it once, after loading."""
    for _, layer in linear_layers(model):
        layer.linear_method.pack(layer)


def leaf_of(name: str) -> str:
    """Return the last component of a layer's name."""
    return name.rpartition(".")[2]


def _divide_parts(
    parts: Mapping[str, int], context: ModelContext, name: str
) -> Mapping[str, Shard]:
    owner = "the {} output features of {} in {}"
    return {
        part: shard_evenly(size, context.ranks, owner.format(size, part, name))
        for part, size in parts.items()
    }


def _shard(features: int | Shard) -> Shard:
    return features if isinstance(features, Shard) else unsharded(features)
