"""Reload the weights of a running model in place, so that their addresses do not change.

If the linear methods keep the checkpoint's layout, the loader fills the parameters of the model.
Otherwise a second model is loaded and packed, and its tensors are copied; for that time the device
has the weights twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces import WeightLoader
from dovetail_torch.layers.linear import linear_layers
from dovetail_torch.layers.torch_linear import TorchLinearMethod
from dovetail_torch.weights.finiteness import check_finite


def reload_weights(
    model: nn.Module, loader: WeightLoader, load_copy: Callable[[WeightLoader], nn.Module]
) -> None:
    """Reload the weights of a loaded model in place.

    load_copy: returns a new, equal model with loaded and packed weights. Raises WeightError for
    invalid files, or if their tensors now have different names, shapes or dtypes.
    """
    methods = {type(layer.linear_method) for _, layer in linear_layers(model)}
    if methods <= {TorchLinearMethod}:
        loader.load(model)
        check_finite(model)
        return
    old, new = _tensors(model), _tensors(load_copy(loader))
    if _layout(old) != _layout(new):
        raise WeightError(
            "the weights cannot be reloaded, because the checkpoint now contains tensors of "
            "different names, shapes or dtypes; create a new engine"
        )
    for name, tensor in old.items():
        tensor.copy_(new[name])


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
