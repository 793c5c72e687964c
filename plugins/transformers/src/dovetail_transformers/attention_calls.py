"""The attention function that transformers calls, and the objects that handle its calls.

Each attention module of a model has an object that handles its calls (`TakesCalls`), so that two
models in one process do not share state. Dimensions: T tokens, H query heads, K key-value heads, D
head size of queries and keys, V head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from dovetail.errors import ContractError, ModelError
from dovetail.interfaces import AttentionContext
from dovetail.interfaces.model import ONE_RANK, RankGroup
from dovetail_torch.layers import Attention, HeadShape

IMPLEMENTATION = "dovetail"
"""The name under which transformers knows the attention function."""
_TAKER = "_dovetail_calls"
_HARMLESS = frozenset(
    {"cache_position", "output_attentions", "output_router_logits", "position_ids", "use_cache"}
)
"""Arguments that do not change the result of a causal attention."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call.

    q_THD, k_TKD, v_TKV: packed tokens of all requests, already rotated.
    """

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor
    scale: float
    sliding_window: int
    soft_cap: float
    sinks: torch.Tensor | None

    @property
    def heads(self) -> HeadShape:
        """The number of query heads, the number of key-value heads, and the head size."""
        (num_heads, size), num_kv_heads = self.q_THD.shape[1:], self.k_TKD.shape[1]
        return HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=size)


class TakesCalls(Protocol):
    """Handles the attention calls of modules."""

    def take(self, module: nn.Module, call: Call) -> torch.Tensor:
        """Return the attention output of a call, [T, H, V]."""


def set_taker(model: nn.Module, taker: TakesCalls) -> None:
    """Let `taker` handle the attention calls of all modules.

    `taker` is not registered as a submodule, even if it is an `nn.Module`.
    """
    for module in model.modules():
        module.__dict__[_TAKER] = taker


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' interface defines it. query: [1, H, T, D].

    Raises ModelError for an argument that a causal attention over a paged cache does not support.
    """
    taker = module.__dict__.get(_TAKER)
    if taker is None:
        raise ContractError(f"{type(module).__name__} computes attention outside of a step")
    name = type(module).__name__
    if attention_mask is not None:
        raise ModelError(f"{name} in transformers masks its scores, which is not supported")
    known = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
    for other in arguments.keys() - known - _HARMLESS:
        if arguments[other] is not None:
            raise ModelError(
                f"{name} in transformers passes {other} to its attention, which is not supported"
            )
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{name} in transformers is not causal, which is not supported")
    call = Call(
        q_THD=query[0].transpose(0, 1),
        k_TKD=key[0].transpose(0, 1),
        v_TKV=value[0].transpose(0, 1),
        scale=arguments.get("scaling") or query.shape[-1] ** -0.5,
        sliding_window=arguments.get("sliding_window") or 0,
        soft_cap=arguments.get("softcap") or 0.0,
        sinks=arguments.get("s_aux"),
    )
    attended_THV: torch.Tensor = taker.take(module, call)
    return attended_THV[None], None


class RecordedCalls:
    """Records the calls of one forward pass. modules, calls: in the order of the calls."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.calls: list[Call] = []

    def take(self, module: nn.Module, call: Call) -> torch.Tensor:
        """Record a call and return zeros."""
        self.modules.append(module)
        self.calls.append(call)
        return call.q_THD.new_zeros((*call.q_THD.shape[:2], call.v_TKV.shape[-1]))


class StepCalls:
    """Passes the calls to the attention context of the current step.

    modules, layers: the modules that make the calls, and the attention layer of each. ranks: divide
    the heads of each layer, even if a module computes the queries, keys and values of all heads on
    every rank. attention: the context of the current step; set before each forward pass.
    """

    def __init__(
        self, modules: list[nn.Module], layers: Sequence[Attention], ranks: RankGroup = ONE_RANK
    ) -> None:
        self.layers = dict(zip(map(id, modules), layers, strict=True))
        self.ranks = ranks
        self.attention: AttentionContext | None = None

    def take(self, module: nn.Module, call: Call) -> torch.Tensor:
        """Return the attention over the cache. Values are zero-padded to the head size of keys."""
        if self.attention is None:
            raise ContractError(f"{type(module).__name__} computes attention outside of a step")
        size, num_heads = call.v_TKV.shape[-1], call.heads.num_heads
        layer = self.layers[id(module)]
        v_TKD = functional.pad(call.v_TKV, (0, call.k_TKD.shape[-1] - size))
        q_THD, k_TKD, v_TKD = (
            self._own(x, count)
            for x, count in (
                (call.q_THD, layer.num_heads),
                (call.k_TKD, layer.num_kv_heads),
                (v_TKD, layer.num_kv_heads),
            )
        )
        own_THV = self.attention.attend(layer.index, q_THD, k_TKD, v_TKD)[..., :size]
        if layer.num_heads == num_heads:
            return own_THV
        return self.ranks.all_gather(own_THV.flatten(1)).unflatten(1, (num_heads, size))

    def _own(self, x_TND: torch.Tensor, count: int) -> torch.Tensor:
        """Return the `count` heads of this rank. x_TND has these heads, or those of all ranks."""
        num_heads = x_TND.shape[1]
        if num_heads == count:
            return x_TND
        return x_TND.narrow(1, self.ranks.rank * num_heads // self.ranks.size, count)
