"""Quantizes the linear layers of a model, some decoder layers at a time.

One pass over the calibration data covers as many decoder layers as have moments of at most
`MAX_MOMENTS_BYTES`. Later passes run the model with the rounded weights of earlier passes.
Dimensions: O output features, I input features, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dovetail.errors import ModelError
from dovetail_quantize.awq import scale_decoder_layer
from dovetail_quantize.calibration import AllMoments, Moments, collect_moments, relative_norm
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
    """One weight of the checkpoint, or the stacked weights of all experts of a layer.

    shape: rows of all experts, and input features. blocks_OB: None for BF16, whose values stay in
    the model. error: relative output error; None without calibration. first_error: if the weight is
    kept at 8 bits, its error with the requested type; otherwise None. unused: experts to which no
    calibration token was routed; they are rounded to nearest.
    """

    name: str
    type_name: str
    shape: tuple[int, int]
    blocks_OB: torch.Tensor | None
    error: float | None
    first_error: float | None = None
    unused: tuple[int, ...] = ()


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

    chunks: chunks of the calibration data; empty for rounding without calibration. note: receives
    progress.
    """
    result = Quantized()
    passes = list(_passes(opened))
    for number, decoders in enumerate(passes):
        note(f"Pass {number + 1} of {len(passes)}: {len(decoders)} decoder layers.")
        layers = [layer for decoder in decoders.values() for layer in decoder]
        moments: AllMoments = collect_moments(opened, layers, chunks) if chunks else {}
        for path, own in decoders.items():
            if settings.method == "awq":
                single = {layer: known[0] for layer, known in moments.items()}
                decoder = opened.module.get_submodule(path)
                scaled = scale_decoder_layer(decoder, single, settings.types)
                moments |= {layer: [known] for layer, known in scaled.items()}
            parts = [
                part
                for layer in own
                for part in _quantize_layer(layer, settings, moments.pop(layer, []))
            ]
            result.parts |= {part.name: part for part in parts}
    return result


def _passes(opened: OpenedModel) -> Iterator[dict[str, list[ParallelLinear]]]:
    """Yield the linear layers that one pass quantizes, by the path of their decoder layer."""
    decoders: dict[str, list[ParallelLinear]] = {}
    for _, layer in linear_layers(opened.module):
        if not isinstance(layer, ParallelLMHead):
            path = ".".join(layer.shape.name.split(".")[:3])
            decoders.setdefault(path, []).append(layer)
    some: dict[str, list[ParallelLinear]] = {}
    num_bytes = 0
    for path, layers in decoders.items():
        own = sum(layer.shape.in_features**2 * 4 * layer.shape.num_experts for layer in layers)
        if some and num_bytes + own > MAX_MOMENTS_BYTES:
            yield some
            some, num_bytes = {}, 0
        some[path] = layers
        num_bytes += own
    if some:
        yield some


def _quantize_layer(
    layer: ParallelLinear, settings: Settings, moments: Sequence[Moments]
) -> Iterator[QuantizedPart]:
    """Quantize the parts of a layer and write the rounded values to its weight.

    moments: one item per expert, or one for a layer without experts; empty without calibration. All
    experts use the same type for a part, because a GGUF file stacks their weights in one tensor.
    """
    shape = layer.shape
    type_name = pick_type(settings.types, shape.in_features)
    parent = shape.name.rpartition(".")[0]
    num_parts = len(shape.part_names) // shape.num_experts
    rows = layer.weight.split(shape.part_sizes)
    factors: list[torch.Tensor | None] = [None] * len(moments)
    if settings.method == "gptq" and type_name != PLAIN:
        factors = [
            inverse_factor(known, settings.damping, shape.name) if known.num_tokens else None
            for known in moments
        ]
    for number, leaf in enumerate(shape.part_names[:num_parts]):
        name = f"{parent}.{leaf.rpartition('.')[2]}.weight"
        weights = rows[number::num_parts]
        yield _Rounding(name, weights, settings, (moments, factors)).run(type_name)


class _Rounding:
    """Rounds one part of a layer, for each expert.

    weights: [O, I] of each expert. known: moments and GPTQ factors of each expert; empty without
    calibration.
    """

    def __init__(
        self,
        name: str,
        weights: Sequence[torch.Tensor],
        settings: Settings,
        known: tuple[Sequence[Moments], Sequence[torch.Tensor | None]],
    ) -> None:
        self._name, self._weights, self._settings = name, weights, settings
        self._moments: Sequence[Moments | None] = known[0] or [None] * len(weights)
        self._factors = known[1] or [None] * len(weights)

    def run(self, type_name: str) -> QuantizedPart:
        """Return the part, after its rounded values are written to the weights."""
        if not all(bool(weight_OI.isfinite().all()) for weight_OI in self._weights):
            raise ModelError(
                f"{self._name} has values that are NaN or infinite: the model is damaged."
            )
        shape = (sum(map(len, self._weights)), self._weights[0].shape[1])
        if type_name == PLAIN:
            return QuantizedPart(
                name=self._name, type_name=PLAIN, shape=shape, blocks_OB=None, error=0.0
            )
        blocks, error = self._rounded(type_name)
        first_error = None
        is_above = error is not None and error > self._settings.max_layer_error
        if is_above and bits_of(type_name) < bits_of(SENSITIVE):
            type_name, first_error = SENSITIVE, error
            blocks, error = self._rounded(type_name, is_weighted=False)
        for weight_OI, blocks_OB in zip(self._weights, blocks, strict=True):
            weight_OI.copy_(decode_rows(blocks_OB, type_name))
        return QuantizedPart(
            name=self._name,
            type_name=type_name,
            shape=shape,
            blocks_OB=torch.cat(blocks),
            error=error,
            first_error=first_error,
            unused=tuple(
                expert
                for expert, known in enumerate(self._moments)
                if known is not None and known.num_tokens == 0
            ),
        )

    def _rounded(
        self, type_name: str, *, is_weighted: bool = True
    ) -> tuple[list[torch.Tensor], float | None]:
        """Return the blocks of each expert, and the relative output error over all experts.

        is_weighted: whether GPTQ corrects the errors, or the activations weight them.
        """
        blocks, squares = [], torch.zeros(2)
        for weight_OI, known, factor_II in zip(
            self._weights, self._moments, self._factors, strict=True
        ):
            if known is None or known.num_tokens == 0:
                blocks.append(quantize_rows(weight_OI, type_name, None))
                continue
            if factor_II is not None and is_weighted:
                kind = BLOCK_TYPES[type_name]
                blocks_OB, values_OI = round_columns(weight_OI, kind, known, factor_II)
            else:
                importance_I = known.mean_squares if is_weighted else None
                blocks_OB = quantize_rows(weight_OI, type_name, importance_I)
                values_OI = decode_rows(blocks_OB, type_name)
            blocks.append(blocks_OB)
            squares += known.squares(weight_OI, values_OI)
        has_tokens = any(known is not None and known.num_tokens for known in self._moments)
        return blocks, relative_norm(squares) if has_tokens else None
