"""AWQ: scales the weights so that features with large activations are rounded more accurately.

The weights of an input feature are multiplied by a scale before rounding, and the output of the
preceding layer is divided by the same scale. The scale is a power of the feature's activation; the
exponent with the smallest output error is used.
Source: Lin et al. 2023, arXiv:2306.00978.
Dimensions: O output features, I input features, H heads, K key-value heads, S head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from dovetail_quantize.calibration import Moments
from dovetail_quantize.layer_plan import PLAIN, pick_type
from dovetail_quantize.rounding import round_to_values
from dovetail_torch.layers.linear import ParallelLinear, QKVParallelLinear

_EXPONENTS = tuple(step / 10 for step in range(1, 10))
_NORMS = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}
_PARENTS = {"qkv_proj": "self_attn", "gate_up_proj": "mlp"}


@torch.inference_mode()
def scale_decoder_layer(
    decoder: nn.Module, moments: Mapping[ParallelLinear, Moments], types: Sequence[str]
) -> dict[ParallelLinear, Moments]:
    """Scale the weights of one decoder layer and return the moments of the scaled inputs.

    decoder: a layer that has the modules `self_attn`, `mlp` and the norms before them. types: block
    types of the format.
    """
    scaled = {}
    for name, norm in _NORMS.items():
        layer = getattr(getattr(decoder, _PARENTS[name]), name)
        scale_I = find_scale(layer, moments[layer], types)
        getattr(decoder, norm).weight.div_(scale_I)
        scaled[layer] = _scale_inputs(layer, moments[layer], scale_I)
    qkv, output = decoder.self_attn.qkv_proj, decoder.self_attn.o_proj
    gate_up, down = decoder.mlp.gate_up_proj, decoder.mlp.down_proj
    scaled[output] = _scale_through(qkv, output, moments[output], types)
    scaled[down] = _scale_through(gate_up, down, moments[down], types)
    return scaled


def _scale_through(
    before: ParallelLinear, layer: ParallelLinear, moments: Moments, types: Sequence[str]
) -> Moments:
    """Scale a layer whose inputs are proportional to the last part of the preceding layer's output.

    Query heads that share a value head also share the scales of their features.
    """
    num_rows = before.shape.part_sizes[-1]
    heads = (1, num_rows)
    if isinstance(before, QKVParallelLinear):
        heads = (before.head_counts[-1], before.head_size)
    repeats = layer.shape.in_features // num_rows
    scale_I = find_scale(layer, moments, types, shared=(heads[0], repeats, heads[1]))
    scale_R = scale_I.view(heads[0], repeats, heads[1])[:, 0].flatten()
    before.weight[-num_rows:].div_(scale_R[:, None])
    if before.bias is not None:
        before.bias[-num_rows:].div_(scale_R)
    return _scale_inputs(layer, moments, scale_I)


def _scale_inputs(layer: ParallelLinear, moments: Moments, scale_I: torch.Tensor) -> Moments:
    layer.weight.mul_(scale_I)
    return moments.scaled(scale_I)


def find_scale(
    layer: ParallelLinear,
    moments: Moments,
    types: Sequence[str],
    *,
    shared: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Return the best scale of each input feature, float32 [I]; ones if scaling does not help.

    shared: features as [groups, features with the same scale, features of a group].
    """
    ones_I = torch.ones(layer.shape.in_features)
    type_name = pick_type(tuple(types), layer.shape.in_features)
    if type_name == PLAIN:
        return ones_I
    size_I = moments.mean_squares.sqrt()
    if shared is not None:
        size_I = size_I.view(shared).mean(1, keepdim=True).expand(shared).flatten()
    weight_OI = layer.weight.float()
    best, best_I = torch.inf, ones_I
    for exponent in (0.0, *_EXPONENTS):
        scale_I = size_I**exponent
        scale_I = scale_I / (scale_I.max() * scale_I.min()).sqrt()
        importance_I = moments.mean_squares / scale_I.square()
        rounded_OI = round_to_values(weight_OI * scale_I, type_name, importance_I) / scale_I
        error = moments.relative_error(weight_OI, rounded_OI)
        if error < best:
            best, best_I = error, scale_I
    return best_I
