"""Weights must be finite: one NaN or infinity corrupts every token that depends on it.

This module checks parameters and does not depend on files or formats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail_torch.layers.linear import linear_layers
from dovetail_torch.weights.assignment import build_weight_table

_NUM_SHOWN = 5


@torch.no_grad()
def check_finite(model: nn.Module) -> None:
    """Raise WeightError, naming weights by the checkpoint's names, if any is NaN or infinite.

    Checks each parameter with at least two bytes per element once, and waits once per device.
    Linear methods check the packed and mapped weights of linear layers.
    """
    parameters = [parameter for parameter in _parameters(model) if _is_checked(parameter)]
    if not parameters:
        return
    devices = {parameter.device for parameter in parameters}
    if all(_are_finite([x for x in parameters if x.device == device]) for device in devices):
        return
    table = build_weight_table(model)
    names = [x.name for x in table.assignments.values() if not bool(x.target.isfinite().all())]
    invalid = list(dict.fromkeys(map(table.names.to_checkpoint, names)))
    more = f" and {len(invalid) - _NUM_SHOWN} more" if len(invalid) > _NUM_SHOWN else ""
    raise WeightError(
        f"NaN or infinite values in {', '.join(invalid[:_NUM_SHOWN])}{more}: the checkpoint is "
        "damaged, or its values are outside of the range of the dtype; download it again, or "
        "choose another dtype"
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values of a floating-point tensor are finite."""
    return tensor.numel() == 0 or _are_finite([tensor])


def _are_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether all parameters of one device are finite."""
    extremes = [torch.stack(torch.aminmax(parameter.detach())) for parameter in parameters]
    # Minimum and maximum are NaN if any element is NaN; an infinity is the minimum or the maximum.
    return bool(torch.stack([extreme.float().isfinite().all() for extreme in extremes]).all())


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that linear methods do not check, each once."""
    others = {
        id(getattr(layer, name))
        for _, layer in linear_layers(model)
        for name in layer.settled | layer.borrows
    }
    return [parameter for parameter in model.parameters() if id(parameter) not in others]


def _is_checked(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.itemsize >= 2 and parameter.numel() > 0
