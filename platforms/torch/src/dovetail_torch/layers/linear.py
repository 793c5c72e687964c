"""Linear layers: what each one is (a `LinearShape`), with the linear method doing all the work.

A layer knows the names that its parts have in a checkpoint. It does not know how its weights are
kept, packed or quantised, nor where they come from. Sizes are those of the whole model: with one
rank, "column" and "row" parallel layers say which side would be divided among several.
Legend: T tokens, I input features, O output features of all parts; of
attention: H query heads, K key-value heads, N all three parts' heads, S head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dovetail.interfaces.linear_method import LinearShape
from dovetail.interfaces.model import ModelContext


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Heads of an attention layer: query heads, key-value heads, features of each."""

    num_heads: int
    num_kv_heads: int
    head_size: int


class ParallelLinear(nn.Module):
    """The base of all linear layers: y = x · Wᵀ + b through the context's linear method.

    name: where the layer stands in the model, "model.layers.0.mlp.down_proj".
    parts: output features by the checkpoint's own names for the last component of `name`, in order.
    shape, linear_method: read by the weight loader and by `pack_linears`.
    settled: names of parameters whose packed form is at hand already; loaders pass over them.
    borrows: names of parameters that the linear method only reads once, when it packs them, and
        holds to be finite then: a loader may lend mapped weights instead of filling them.
    borrowed: what was lent, by number of the part; the parameter's own rows are not filled then.
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
        super().__init__()
        self.linear_method = context.linear_method
        self.shape = LinearShape(
            name=name,
            in_features=in_features,
            part_names=tuple(parts),
            part_sizes=tuple(parts.values()),
            bias=bias,
            dtype=context.dtype,
            device=context.device,
        )
        self.settled: frozenset[str] = frozenset()
        self.borrows: frozenset[str] = frozenset()
        self.borrowed: dict[int, torch.Tensor] = {}
        self.linear_method.create(self, self.shape)

    def borrow(self, part: int, weight: torch.Tensor) -> None:
        """Take a private, read-only mapping of part number `part` of the weight."""
        self.borrowed[part] = weight

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return [T, O]."""
        return self.linear_method.apply(self, x_TI)

    def extra_repr(self) -> str:
        """Name the sizes in the module's printed form."""
        parts = ", ".join(map("{}={}".format, self.shape.part_names, self.shape.part_sizes))
        return f"in_features={self.shape.in_features}, {parts}, bias={self.shape.bias}"


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose output features would be divided among ranks."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(context, name, in_features, {_leaf(name): out_features}, bias=bias)


class RowParallelLinear(ColumnParallelLinear):
    """A linear layer whose input features would be divided among ranks."""


class MergedColumnParallelLinear(ParallelLinear):
    """Several linear layers of the same input in one product, outputs side by side.

    parts: output features by the checkpoint's names, such as {"gate_proj": 64, "up_proj": 64}.
    """


class QKVParallelLinear(ParallelLinear):
    """The projections q_proj, k_proj and v_proj in one product; `split` takes them apart."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        heads: HeadShape,
        *,
        bias: bool = False,
    ) -> None:
        kv_features = heads.num_kv_heads * heads.head_size
        parts = {
            "q_proj": heads.num_heads * heads.head_size,
            "k_proj": kv_features,
            "v_proj": kv_features,
        }
        super().__init__(context, name, hidden_size, parts, bias=bias)
        self.head_counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        self.head_size = heads.head_size

    def split(self, qkv_TO: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q [T, H, S], k [T, K, S] and v [T, K, S]: views, not contiguous.

        `qkv_TO` must be contiguous, as linear methods return it.
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


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
