"""Computes results from a pooled hidden state: dense layers, normalization, class activations.

Everything after the model is computed in float32. Dimensions: R results, D features, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from dovetail.errors import ModelError, WeightError
from dovetail.value_checks import shorten
from dovetail_torch.weights.checkpoint_files import (
    WeightEntry,
    find_weight_files,
    open_weights,
    read_headers,
)

Activation = Callable[[torch.Tensor], torch.Tensor]

DENSE_ACTIVATIONS: Mapping[str, Activation] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}
_CLASS_ACTIVATIONS: Mapping[str, Activation] = {
    "Identity": lambda x: x,
    "Sigmoid": torch.sigmoid,
    "Softmax": partial(torch.softmax, dim=-1),
}
"""Activations of a classification head, by the class name of torch."""


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """activation(W · x + b), in float32."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    activation: Activation

    def __call__(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the output features."""
        return self.activation(functional.linear(x_RD, self.weight_OI, self.bias_O))


def load_dense(
    model_dir: Path, layers: Sequence[Mapping[str, Any]], num_features: int, device: torch.device
) -> tuple[DenseLayer, ...]:
    """Load the dense layers after pooling. num_features: size of the hidden states.

    Raises ModelError if the sizes of consecutive layers differ, and WeightError for a file that is
    missing or does not match its config.json.
    """
    loaded = []
    for layer in layers:
        folder = model_dir / layer["folder"]
        if layer["in_features"] != num_features:
            raise ModelError(
                f"{folder / 'config.json'}: in_features is {layer['in_features']}, but the layer "
                f"before it has {num_features} features."
            )
        num_features = layer["out_features"]
        entries = read_headers(find_weight_files(folder))
        shapes = {"linear.weight": (num_features, layer["in_features"])}
        if layer["bias"]:
            shapes["linear.bias"] = (num_features,)
        weights = {name: _read(entries, name, shape, folder) for name, shape in shapes.items()}
        bias_O = weights.get("linear.bias")
        loaded.append(
            DenseLayer(
                weight_OI=weights["linear.weight"].to(device),
                bias_O=None if bias_O is None else bias_O.to(device),
                activation=DENSE_ACTIVATIONS[layer["activation"]],
            )
        )
    return tuple(loaded)


def _read(
    entries: Mapping[str, WeightEntry], name: str, shape: tuple[int, ...], folder: Path
) -> torch.Tensor:
    entry = entries.get(name)
    if entry is None or entry.shape != shape or entry.dtype not in ("F32", "F16", "BF16"):
        stated = "is missing" if entry is None else f"has {entry.dtype} {list(entry.shape)}"
        raise WeightError(
            f"{folder}: weight {name} {stated}; config.json requires floats {list(shape)}."
        )
    with open_weights(entry.path) as handle:
        weight: torch.Tensor = handle.get_tensor(name).to(torch.float32, copy=True)
    if not weight.isfinite().all():
        raise WeightError(f"{folder}: weight {name} contains NaN or infinity.")
    return weight


def class_activation(hf_config: Mapping[str, Any], num_labels: int) -> Activation:
    """Return the activation that turns the outputs of a classification head into probabilities.

    The order is that of sentence-transformers and transformers: an activation that config.json
    names, then `problem_type`, then sigmoid for one label and softmax for several.
    """
    section = hf_config.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, Mapping) else None
    named = named or hf_config.get("sbert_ce_default_activation_function")
    if named is not None:
        name = named.rpartition(".")[2] if isinstance(named, str) else ""
        if name not in _CLASS_ACTIVATIONS:
            raise ModelError(
                f"config.json: the head's activation {shorten(named)} is not supported; use "
                f"one of these classes of torch: {', '.join(_CLASS_ACTIVATIONS)}."
            )
        return _CLASS_ACTIVATIONS[name]
    problem = hf_config.get("problem_type")
    if problem == "regression":
        return _CLASS_ACTIVATIONS["Identity"]
    several = num_labels > 1 and problem != "multi_label_classification"
    return _CLASS_ACTIVATIONS["Softmax" if several else "Sigmoid"]
