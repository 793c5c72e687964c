"""Shards a model of the transformers library over ranks, by the model's tensor-parallel plan.

A plan maps names of modules and parameters, with `*` for numbers, to styles. The output of each
sharded module is either this rank's part of the features, which only a module with a sharded input
may read, or the same on all ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from dovetail.errors import ConfigError
from dovetail.interfaces.model import RankGroup
from dovetail.value_checks import shorten
from dovetail_torch.distributed.shard import Shard, shard_evenly, shard_unevenly

if TYPE_CHECKING:
    import transformers

_UNSHARDED = frozenset(
    {"local_params", "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce"}
)
"""Styles without an effect on a forward pass."""


@dataclass(frozen=True, kw_only=True)
class FakeRanks:
    """Ranks that do not communicate, to compute shapes: each rank has the values of rank 0."""

    size: int
    rank: int = 0
    batch_invariant: bool = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` once per rank."""
        return torch.cat([x] * self.size, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


@dataclass(frozen=True, kw_only=True)
class _Style:
    """How a module or a parameter is sharded.

    dim: the sharded dimension of weights, counted from the last one; 0 for none. packed: whether
    it consists of two parts, each of which is sharded. uneven: whether the shards may have
    different sizes. install: changes the forward pass of a module.
    """

    dim: int = 0
    packed: bool = False
    uneven: bool = False
    install: Callable[[nn.Module, Shard | None, RankGroup], None] | None = None


def check_plan(model: transformers.PreTrainedModel, ranks: RankGroup) -> None:
    """Raise ConfigError if the plan of a model is missing or not supported."""
    plan = _plan_of(model)
    for entry, name in plan.items():
        # config.json can replace the plan of the class.
        if not isinstance(name, str) or name not in _STYLES.keys() | _UNSHARDED:
            reason = (
                f"its plan has the style {shorten(name)} ({shorten(entry)}), which is not supported"
            )
            raise _unsupported(model, ranks, reason)
    for name, module in model.named_modules():
        style = _style_of(plan, name)
        if style and style.dim and not isinstance(module, nn.Linear | nn.Embedding):
            reason = f"its plan shards {name} ({type(module).__name__}), which is not supported"
            raise _unsupported(model, ranks, reason)
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    if all(owner in ends for _, owner, _, style in _entries(model) if style.dim):
        raise _unsupported(model, ranks, "it has no plan for the decoder layers")


def shard_model(model: transformers.PreTrainedModel, ranks: RankGroup) -> None:
    """Reduce the parameters of `model` to the shard of this rank, and change its forward pass.

    Raises ConfigError if a size is not divisible by the number of ranks.
    """
    entries = list(_entries(model))
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    planned = Counter(
        id(module._parameters[leaf])
        for _, module, leaves, style in entries
        if style.dim
        for leaf in leaves
    )
    parts: dict[tuple[int, int], nn.Parameter] = {}
    for name, module, leaves, style in entries:
        whole = [(leaf, p) for leaf in leaves if (p := module._parameters[leaf]) is not None]
        if any(planned[id(p)] < owners[id(p)] for _, p in whole):
            continue  # a module that is not sharded shares the weight
        shard = None
        for leaf, parameter in whole:
            if style.dim == -1 and leaf == "bias":
                module._parameters[leaf] = None if ranks.rank else parameter  # added once
                continue
            dim = max(-parameter.ndim, style.dim)
            shard = _shard_of(parameter.shape[dim], style, ranks, f"{name}.{leaf}")
            key = id(parameter), dim
            if key not in parts:  # tied weights stay tied
                parts[key] = _part(parameter, dim, shard, packed=style.packed)
            module._parameters[leaf] = parts[key]
        if style.install is not None:
            style.install(module, shard, ranks)


def _entries(
    model: transformers.PreTrainedModel,
) -> Iterator[tuple[str, nn.Module, tuple[str, ...], _Style]]:
    """Yield name, module, names of the sharded parameters and style of each entry of the plan."""
    plan = _plan_of(model)
    for name, module in model.named_modules():
        for leaf in module._parameters:
            if style := _style_of(plan, f"{name}.{leaf}"):
                yield name, module, (leaf,), _Style(dim=style.dim, packed=style.packed)
        if style := _style_of(plan, name):
            yield name, module, tuple(module._parameters) if style.dim else (), style


def _plan_of(model: transformers.PreTrainedModel) -> dict[str, str]:
    return getattr(model, "_tp_plan", None) or {}


def _style_of(plan: Mapping[str, str], name: str) -> _Style | None:
    """Return the style of a module or a parameter if the plan has one with an effect."""
    return _STYLES.get(plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), ""))


def _unsupported(model: nn.Module, ranks: RankGroup, reason: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size={ranks.size} was requested, but transformers cannot shard "
        f"{type(model).__name__}: {reason}. Set tensor_parallel_size=1, or install a plugin with a "
        "model of this architecture."
    )


def _shard_of(size: int, style: _Style, ranks: RankGroup, owner: str) -> Shard:
    if style.packed:
        return shard_evenly(size // 2, ranks, f"the {size // 2} features of each half of {owner}")
    shard_it = shard_unevenly if style.uneven else shard_evenly
    return shard_it(size, ranks, f"the {size} features of {owner}")


def _part(parameter: nn.Parameter, dim: int, shard: Shard, *, packed: bool) -> nn.Parameter:
    """Return a copy of a part, so that the memory of the whole parameter can be freed."""
    halves = parameter.data.chunk(2, dim) if packed else (parameter.data,)
    own = [half.narrow(dim, shard.start, shard.size) for half in halves]
    return nn.Parameter(torch.cat(own, dim), requires_grad=False)


def _sum_outputs(module: nn.Module, shard: Shard | None, ranks: RankGroup) -> None:
    del shard

    def add(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return ranks.all_reduce(output)

    module.register_forward_hook(add)


def _split_inputs(module: nn.Module, shard: Shard | None, ranks: RankGroup) -> None:
    assert shard is not None

    def split(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0][..., shard.slice], *args[1:])

    module.register_forward_pre_hook(split)
    _sum_outputs(module, shard, ranks)


def _gather_outputs(module: nn.Module, shard: Shard | None, ranks: RankGroup) -> None:
    assert shard is not None
    whole = shard.whole
    maximum = -(-whole // ranks.size)

    def gather(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(output, (0, maximum - output.shape[-1]))
        return ranks.all_gather(padded)[..., :whole]

    module.register_forward_hook(gather)


def _look_up_part(module: nn.Module, shard: Shard | None, ranks: RankGroup) -> None:
    """Let an embedding look up the ids of this rank, use zeros for others, and all-reduce."""
    assert shard is not None
    look_up, start, size = module.forward, shard.start, shard.size
    module.padding_idx = None  # which only gradients need

    def forward(ids: torch.Tensor) -> torch.Tensor:
        own = ids - start
        outside = (own < 0) | (own >= size)
        values = look_up(own.masked_fill(outside, 0))
        return ranks.all_reduce(values.masked_fill(outside[..., None], 0))

    module.forward = forward  # type: ignore[method-assign]


_GATHERED = _Style(dim=-2, uneven=True, install=_gather_outputs)
_SPLIT = _Style(dim=-1, uneven=True, install=_split_inputs)
_STYLES = {
    "all_reduce": _Style(install=_sum_outputs),
    "colwise": _Style(dim=-2),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "embedding_rowwise": _Style(dim=-2, uneven=True, install=_look_up_part),
    "moe_tp_experts": _Style(install=_sum_outputs),
    "packed_colwise": _Style(dim=-2, packed=True),
    "packed_rowwise": _Style(dim=-1, packed=True),
    "rowwise": _Style(dim=-1, install=_sum_outputs),
    "rowwise_rep": _SPLIT,
    "rowwise_split_input": _SPLIT,
}
