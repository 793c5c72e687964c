"""Weight offload: the last layers of a model stay in pinned host memory.

Two slots of device memory hold the weights of one layer each. While a layer computes in one slot, a
second stream copies the weights of the next offloaded layer to the other slot, so the device waits
only if a copy takes longer than a layer. The host never waits. A slot is written after the layer
that used it has ended, and read after its copy has ended; device events ensure both orders.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from dovetail.errors import ConfigError
from dovetail.interfaces.requested_config import OFFLOAD_OPTION
from dovetail_torch.layers.linear import linear_layers, pack_linears
from dovetail_torch.out_of_memory import explain_oom

logger = logging.getLogger(__name__)

NUM_SLOTS = 2
ALIGNMENT = 512
_HOST = torch.empty(0).device
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """The layers to offload. types: the type of each layer by its index in the list of layers."""

    types: dict[int, type[nn.Module]]

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Create the weights of planned layers in host memory, not on the device."""

        def move(owner: nn.Module, name: str, layer: nn.Module | None) -> None:
            if not isinstance(owner, nn.ModuleList) or layer is None:
                return
            if self.types.get(int(name)) is type(layer):
                _replace(layer, lambda weight: torch.empty_like(weight, device=_HOST))

        hook = register_module_module_registration_hook(move)
        try:
            yield
        finally:
            hook.remove()


def plan_offload(model: nn.Module, budget: int) -> OffloadPlan:
    """Return the plan that keeps at most `budget` bytes of the last layers in host memory.

    model: a model of the same shape, possibly on the device "meta". Raises ConfigError if the
    budget is larger than all layers, or if it saves no device memory.
    """
    layers = _layers(model)
    sizes = [_num_bytes(layer) for layer in layers]
    total, option = sum(sizes), f"{OFFLOAD_OPTION}={budget / _GIB:.6g}"
    if budget > total:
        raise ConfigError(
            f"{option} is more than the weights of all {len(layers)} layers of "
            f"a worker, {total / _GIB:.6g} GiB; set it to at most {_floor(total)}."
        )
    first = len(layers)
    while first > 0 and sum(sizes[first - 1 :]) <= budget:
        first -= 1
    if len(layers) - first <= NUM_SLOTS:
        raise ConfigError(
            f"{option} saves no device memory, because {NUM_SLOTS} layers are "
            f"always on the device; set it to more than "
            f"{sum(sizes[-NUM_SLOTS:]) / _GIB:.6g}, at least one layer more, or omit it."
        )
    return OffloadPlan(types={i: type(layers[i]) for i in range(first, len(layers))})


def pack_offloaded(model: nn.Module, plan: OffloadPlan, device: torch.device) -> None:
    """Pack the linear layers of a model. Offloaded layers are on the device while they are packed.

    Afterwards their weights are in host memory again.
    """
    layers = _layers(model)
    packed: set[nn.Module] = set()
    for index in plan.types:
        layer = layers[index]
        _replace(layer, lambda weight: weight.to(device))
        pack_linears(layer)
        _replace(layer, lambda weight: weight.to(_HOST))
        packed.update(layer.modules())
    for _, linear in linear_layers(model):
        if linear not in packed:
            linear.linear_method.pack(linear)


class OffloadedLayers:
    """The offloaded layers of a loaded model, in the order of their execution."""

    @explain_oom("the offloaded weights", f"lower {OFFLOAD_OPTION}, or free host memory")
    def __init__(
        self,
        model: nn.Module,
        plan: OffloadPlan,
        module: Any,
        pinned: Callable[[int], torch.Tensor],
        device: torch.device,
    ) -> None:
        """Copy the weights to pinned memory, and let the layers compute in the slots.

        module: torch's module of the device. pinned: returns pinned memory of a size in bytes.
        """
        every = _layers(model)
        self._layers = [every[index] for index in plan.types]
        sizes = [_num_bytes(layer) for layer in self._layers]
        slots = [
            torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)
        ]
        self._module = module
        self._copies = module.Stream()
        self._held: list[int | None] = [None] * NUM_SLOTS
        self._copied: list[Any] = [None] * NUM_SLOTS
        self._sources, self._targets = [], []
        for number, (layer, size) in enumerate(zip(self._layers, sizes, strict=True)):
            source, slot = pinned(size), slots[number % NUM_SLOTS][:size]
            _fill(layer, source)
            offsets = iter(_offsets(layer))
            _replace(layer, lambda weight, s=slot, o=offsets: _view(s, next(o), weight))
            self._sources.append(source)
            self._targets.append(slot)
            layer.register_forward_pre_hook(partial(self._before, number))
            layer.register_forward_hook(partial(self._after, number))
        for number in range(NUM_SLOTS):
            self._fetch(number)
        shown = (len(sizes), sum(sizes) / _GIB)
        logger.info("%d layers with %.2f GiB of weights stay in host memory.", *shown)

    def _before(self, number: int, layer: nn.Module, args: Sequence[Any]) -> None:
        """Let the device wait for the weights of a layer."""
        slot = number % NUM_SLOTS
        if self._held[slot] != number:  # the layers run in another order
            self._fetch(number)
        self._module.current_stream().wait_event(self._copied[slot])

    def _after(self, number: int, layer: nn.Module, args: Sequence[Any], result: Any) -> None:
        """Fetch the weights of the next layer that uses this layer's slot."""
        following = number + NUM_SLOTS
        if following >= len(self._layers):  # the first layer of the next step in this slot
            following = number % NUM_SLOTS
        self._fetch(following)

    def _fetch(self, number: int) -> None:
        """Copy the weights of a layer to its slot, after the work submitted so far."""
        slot = number % NUM_SLOTS
        if self._held[slot] == number:
            return
        self._copies.wait_stream(self._module.current_stream())
        with self._module.stream(self._copies):
            self._targets[number].copy_(self._sources[number], non_blocking=True)
            self._copied[slot] = self._copies.record_event()
        self._held[slot] = number


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the list of modules with the most weights."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(map(_num_bytes, layers)), default=[])


def _floor(num_bytes: int) -> str:
    """Return a number of bytes in GiB, rounded down so that the option accepts it."""
    return f"{math.floor(num_bytes / _GIB * 1e6) / 1e6:g}"


def _offsets(layer: nn.Module) -> list[int]:
    """Return the offset of each parameter in the memory of a layer, and the end, in bytes."""
    offsets = [0]
    for weight in layer.parameters():
        offsets.append(offsets[-1] + -(-_extent(weight) // ALIGNMENT) * ALIGNMENT)
    return offsets


def _num_bytes(layer: nn.Module) -> int:
    return _offsets(layer)[-1]


def _extent(weight: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor with any strides."""
    if not weight.numel():
        return 0
    pairs = zip(weight.shape, weight.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in pairs)) * weight.itemsize


def _view(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a part of `memory` with the shape, strides and dtype of a tensor."""
    part = memory[offset : offset + _extent(like)].view(like.dtype)
    return part.as_strided(like.shape, like.stride())


def _fill(layer: nn.Module, memory: torch.Tensor) -> None:
    for weight, offset in zip(layer.parameters(), _offsets(layer), strict=False):
        _view(memory, offset, weight).copy_(weight)


def _replace(layer: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter, in the order of `parameters()`; shared ones stay shared."""
    created: dict[int, nn.Parameter] = {}
    old = list(layer.parameters())  # keeps the objects, so that their ids stay unique
    for weight in old:
        created[id(weight)] = nn.Parameter(make(weight), requires_grad=False)
    for module in layer.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, created[id(weight)])
