"""The scales of the KV cache in a checkpoint: two for each layer, one of keys and one of values.

Checkpoints of compressed-tensors and ModelOpt name them after the attention module or after its
projection. Checkpoints may have them for all layers, some or none; a missing scale is 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail_torch.layers.attention import Attention

_NAME = re.compile(r"(.+?)\.(?:attn\.|(?P<part>[kv])_proj\.)?(?P<kind>[kv])_scale")


@dataclass(frozen=True, kw_only=True)
class ScaleAssignment:
    """The target of one scale. target: float32 [1], a part of `Attention.kv_scales`."""

    name: str
    target: torch.Tensor
    shape: tuple[int, ...] = ()

    def check(self, shape: Collection[int], source: str) -> None:
        """Raise WeightError unless the scale has exactly one element; `source` names the file."""
        if math.prod(shape) != 1:
            raise WeightError(
                f"{source}: the scale {self.name} has the shape {list(shape)}, but only one scale "
                "for all keys or values of a layer is supported; set kv_cache_scales='token'"
            )

    def fill(self, weight: torch.Tensor, *, is_mapped: bool = False) -> int:
        """Copy the scale, and return its size in bytes; raise WeightError if it is invalid."""
        scale = float(weight.reshape(-1)[0].to(self.target.dtype))
        if not 0.0 < scale < math.inf:
            raise WeightError(
                f"the scale {self.name} is {scale} in float32; a scale must be positive and "
                "finite: the checkpoint is damaged, or set kv_cache_scales='token'"
            )
        self.target.fill_(scale)
        return weight.nbytes


def is_kv_scale(name: str) -> bool:
    """Return whether a weight of this name is a scale of the KV cache."""
    match = _NAME.fullmatch(name)
    return match is not None and match["part"] in (None, match["kind"])


def scale_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the targets of scales by the model's name, "model.layers.0.self_attn.k_scale"."""
    return {
        f"{name.rpartition('.')[0]}.{kind}_scale": scales[index : index + 1]
        for name, scales in _layers(model)
        for index, kind in enumerate("kv")
    }


def normal_scale_name(name: str) -> str:
    """Return the name of a scale without the name of a projection."""
    match = _NAME.fullmatch(name)
    return name if match is None else f"{match[1]}.{match['kind']}_scale"


def _layers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.kv_scales is not None:
            yield name, module.kv_scales
