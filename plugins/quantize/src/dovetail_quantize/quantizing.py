"""Quantizes the linear layers of a model, some decoder layers at a time.

The moments of all layers of a pass fit `MAX_MOMENTS_BYTES`. Later passes run the model with the
rounded weights of earlier passes.
Dimensions: O output features, I input features, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dovetail.errors import ModelError
from dovetail_quantize.awq import scale_decoder_layer
from dovetail_quantize.calibration import Moments, collect_moments
from dovetail_quantize.gptq import inverse_factor, round_columns
from dovetail_quantize.layer_plan import PLAIN, SENSITIVE, bits_of, pick_type
from dovetail_quantize.opened_model import OpenedModel
from dovetail_quantize.rounding import BLOCK_TYPES, decode_rows, quantize_rows
from dovetail_torch.layers import ParallelLMHead, linear_layers
from dovetail_torch.layers.linear import ParallelLinear

MAX_MOMENTS_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How layers are quantized. types: block types in order of preference.

    max_layer_error: a layer whose relative output error is greater is kept at 8 bits.
    """

    method: str
    types: tuple[str, ...]
    max_layer_error: float
    damping: float


@dataclass(frozen=True, kw_only=True)
class QuantizedPart:
    """One weight of the checkpoint. blocks_OB: None for BF16, whose values stay in the model.

    error: relative error of its outputs; None without calibration. first_error: the error before
    the weight was kept at more bits, or None.
    """

    name: str
    type_name: str
    shape: tuple[int, int]
    blocks_OB: torch.Tensor | None
    error: float | None
    first_error: float | None = None


@dataclass
class Quantized:
    """The quantized parts by name, in the order of the model."""

    parts: dict[str, QuantizedPart] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """The mean number of bits per weight over all parts."""
        sizes = [part.shape[0] * part.shape[1] for part in self.parts.values()]
        bits = [bits_of(part.type_name) for part in self.parts.values()]
        return sum(map(float.__mul__, bits, map(float, sizes))) / sum(sizes)


@torch.inference_mode()
def quantize_layers(
    opened: OpenedModel,
    settings: Settings,
    chunks: Sequence[Sequence[int]],
    note: Callable[[str], None],
) -> Quantized:
    """Quantize all linear layers except the LM head. The model's weights become the rounded values.

    chunks: chunks of the calibration text; empty for rounding without one. note: receives progress.
    """
    result = Quantized()
    passes = list(_passes(opened))
    for number, decoders in enumerate(passes):
        note(f"Pass {number + 1} of {len(passes)}: {len(decoders)} decoder layers.")
        layers = [layer for decoder in decoders.values() for layer in decoder]
        moments = dict(collect_moments(opened, layers, chunks)) if chunks else {}
        for path, own in decoders.items():
            if settings.method == "awq":
                decoder = opened.module.get_submodule(path)
                moments |= scale_decoder_layer(decoder, moments, settings.types)
            parts = [
                part
                for layer in own
                for part in _quantize_layer(layer, settings, moments.pop(layer, None))
            ]
            result.parts |= {part.name: part for part in parts}
    return result


def _passes(opened: OpenedModel) -> Iterator[dict[str, list[ParallelLinear]]]:
    """Yield the linear layers of some decoder layers, by the path of the decoder layer."""
    decoders: dict[str, list[ParallelLinear]] = {}
    for _, layer in linear_layers(opened.module):
        if not isinstance(layer, ParallelLMHead):
            path = ".".join(layer.shape.name.split(".")[:3])
            decoders.setdefault(path, []).append(layer)
    some: dict[str, list[ParallelLinear]] = {}
    num_bytes = 0
    for path, layers in decoders.items():
        own = sum(layer.shape.in_features**2 * 4 for layer in layers)
        if some and num_bytes + own > MAX_MOMENTS_BYTES:
            yield some
            some, num_bytes = {}, 0
        some[path] = layers
        num_bytes += own
    if some:
        yield some


def _quantize_layer(
    layer: ParallelLinear, settings: Settings, moments: Moments | None
) -> Iterator[QuantizedPart]:
    """Quantize the parts of a layer and write the rounded values to its weight."""
    type_name = pick_type(settings.types, layer.shape.in_features)
    factor_II = None
    if settings.method == "gptq" and moments is not None and type_name != PLAIN:
        factor_II = inverse_factor(moments, settings.damping, layer.shape.name)
    parent = layer.shape.name.rpartition(".")[0]
    rows = layer.weight.split(layer.shape.part_sizes)
    for leaf, weight_OI in zip(layer.shape.part_names, rows, strict=True):
        name = f"{parent}.{leaf}.weight"
        yield _quantize_part(name, weight_OI, type_name, settings, (moments, factor_II))


def _quantize_part(
    name: str,
    weight_OI: torch.Tensor,
    type_name: str,
    settings: Settings,
    known: tuple[Moments | None, torch.Tensor | None],
) -> QuantizedPart:
    moments, factor_II = known
    shape = (weight_OI.shape[0], weight_OI.shape[1])
    if not bool(weight_OI.isfinite().all()):
        raise ModelError(f"{name} has values that are NaN or infinite: the model is damaged.")
    if type_name == PLAIN:
        return QuantizedPart(name=name, type_name=PLAIN, shape=shape, blocks_OB=None, error=0.0)
    if moments is not None and factor_II is not None:
        blocks_OB, values_OI = round_columns(weight_OI, BLOCK_TYPES[type_name], moments, factor_II)
    else:
        importance_I = None if moments is None else moments.mean_squares
        blocks_OB = quantize_rows(weight_OI, type_name, importance_I)
        values_OI = decode_rows(blocks_OB, type_name)
    error = None if moments is None else moments.relative_error(weight_OI, values_OI)
    first_error = None
    keeps = error is not None and error > settings.max_layer_error
    if moments is not None and keeps and bits_of(type_name) < bits_of(SENSITIVE):
        type_name, first_error = SENSITIVE, error
        blocks_OB = quantize_rows(weight_OI, type_name)
        values_OI = decode_rows(blocks_OB, type_name)
        error = moments.relative_error(weight_OI, values_OI)
    weight_OI.copy_(values_OI)
    return QuantizedPart(
        name=name,
        type_name=type_name,
        shape=shape,
        blocks_OB=blocks_OB,
        error=error,
        first_error=first_error,
    )
