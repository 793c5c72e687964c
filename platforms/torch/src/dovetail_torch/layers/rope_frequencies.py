"""Frequencies of rotary position embedding, from the old or new form of a config.json.

The old form is `rope_theta` and `rope_scaling` ("type" or "rope_type"); the new form is
`rope_parameters`, which contains all parameters. A type that is not in `ROPE_TYPES` is rejected.
Dimensions: F half of rotary_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.errors import ModelError, nearest
from dovetail.value_checks import shorten

Parameters = Mapping[str, Any]
Frequencies = tuple[torch.Tensor, float]

DEFAULT_THETA = 10000.0
_OTHER_NAMES = {"mrope": "default", "su": "longrope"}
"""Other names of types. All coordinates of a text token are equal, so mrope is the default type."""
_MINIMUM, _GREATEST = 1e-30, 1e30
"""The valid range. No model was trained with values outside of it, and float32 would overflow."""
_MAX_FREQUENCY = 1e28
"""Maximum angle of a position. With a larger one, the angle of the last position is infinite."""


def read_rope_parameters(
    hf_config: Mapping[str, Any],
    *,
    layer_type: str = "",
    default_theta: float = DEFAULT_THETA,
    default_share: float = 1.0,
) -> dict[str, Any]:
    """Return the rope parameters of a config.json in the new form.

    layer_type: the type of layer whose parameters are read if they differ by type, such as
    "sliding_attention". default_theta, default_share: rope_theta and partial_rotary_factor if
    config.json does not have them.
    The result always contains "rope_type", "rope_theta" and "partial_rotary_factor", and, if they
    are known, "original_max_position_embeddings" and "max_position_embeddings". Raises ModelError
    for an unknown type, and for parameters that differ by layer if layer_type has none.
    """
    rope_config = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if isinstance(rope_config, Mapping) and isinstance(rope_config.get(layer_type), Mapping):
        rope_config = rope_config[layer_type]
    if not isinstance(rope_config, Mapping):
        raise ModelError(
            f"config.json: rope_parameters is {shorten(rope_config)}; it must be an object"
        )
    if any(isinstance(value, Mapping) for value in rope_config.values()):
        raise ModelError(
            f"config.json: rope_parameters differ between layer types ({', '.join(rope_config)}); "
            "the rotary embedding must be the same for all layers"
        )
    parameters = dict(rope_config)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if isinstance(rope_type, str):
        rope_type = _OTHER_NAMES.get(rope_type, rope_type)
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ModelError(
            f"config.json: rope type {shorten(rope_type)} is not supported; supported types are "
            f"{', '.join(sorted(ROPE_TYPES))}.{nearest(str(rope_type), ROPE_TYPES)}"
        )
    parameters["rope_type"] = rope_type
    # If a user overrides only rope_scaling, keep the theta of the new form.
    new_form = hf_config.get("rope_parameters")
    new_form = new_form if isinstance(new_form, Mapping) else {}
    defaults = {"rope_theta": default_theta, "partial_rotary_factor": default_share}
    for field, default in defaults.items():
        if parameters.get(field) is None:
            parameters[field] = new_form.get(field) or hf_config.get(field) or default
    # A length at the top level of config.json takes precedence.
    for length in (
        hf_config.get("original_max_position_embeddings"),
        parameters.get("original_max_position_embeddings"),
        hf_config.get("max_position_embeddings"),
    ):
        if length:
            parameters["original_max_position_embeddings"] = length
            break
    parameters["max_position_embeddings"] = hf_config.get("max_position_embeddings")
    _number(parameters, "partial_rotary_factor")
    return parameters


def rope_frequencies(parameters: Parameters, rotary_dim: int) -> Frequencies:
    """Return the angles per position, float32 [F], and a multiplier of cosines and sines.

    parameters: as `read_rope_parameters` returns them. Raises ModelError, naming the field, if
    one is missing or not a number, and for angles that are too large for float32.
    """
    frequency_F, scale = ROPE_TYPES[parameters["rope_type"]](parameters, rotary_dim)
    if frequency_F.device.type != "meta" and not bool((frequency_F < _MAX_FREQUENCY).all()):
        raise ModelError(
            f"config.json: rope_theta {shorten(parameters['rope_theta'])} and the other parameters "
            f"of rope type {parameters['rope_type']!r} give angles above {_MAX_FREQUENCY:g}: "
            "correct rope_parameters (rope_scaling in older files)"
        )
    return frequency_F, scale


def _default(parameters: Parameters, rotary_dim: int) -> Frequencies:
    """Su et al. 2021, arXiv:2104.09864: theta ** (-2·i / rotary_dim)."""
    exponent_F = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / (_number(parameters, "rope_theta") ** exponent_F), 1.0


def _linear(parameters: Parameters, rotary_dim: int) -> Frequencies:
    """Position interpolation, Chen et al. 2023, arXiv:2306.15595."""
    frequency_F, _ = _default(parameters, rotary_dim)
    return frequency_F / _number(parameters, "factor"), 1.0


def _llama3(parameters: Parameters, rotary_dim: int) -> Frequencies:
    """Llama 3.1, arXiv:2407.21783: only low frequencies are interpolated."""
    frequency_F, _ = _default(parameters, rotary_dim)
    low = _number(parameters, "low_freq_factor")
    high = _number(parameters, "high_freq_factor")
    turns_F = _number(parameters, "original_max_position_embeddings") * frequency_F / (2 * math.pi)
    if high > low:
        keep_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    else:  # there is no ramp between the two values, as in transformers
        keep_F = (turns_F >= low).to(turns_F.dtype)
    slow_F = frequency_F / _number(parameters, "factor")
    return (1 - keep_F) * slow_F + keep_F * frequency_F, 1.0


def _yarn(parameters: Parameters, rotary_dim: int) -> Frequencies:
    """YaRN, Peng et al. 2023, arXiv:2309.00071: a ramp over the dimensions, and a temperature."""
    frequency_F, _ = _default(parameters, rotary_dim)
    theta = _number(parameters, "rope_theta")
    if theta == 1:
        raise ModelError(
            "config.json: rope type 'yarn' does not support rope_theta=1; set another value"
        )
    length = _number(parameters, "original_max_position_embeddings")

    def dimension_of(turns: float) -> float:
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension_of(_number(parameters, "beta_fast", 32, zero_is_absent=True))
    last = dimension_of(_number(parameters, "beta_slow", 1, zero_is_absent=True))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    # An integer could be too large for torch.
    first, last = max(float(first), 0.0), min(last, rotary_dim - 1)
    # Equal ends would divide by zero; use a step at `first` instead.
    width = (last - first) or 0.001
    dimension_F = torch.arange(rotary_dim // 2, dtype=torch.float32)
    slow_share_F = ((dimension_F - first) / width).clamp(0, 1)
    slow_F = frequency_F / _yarn_stretch(parameters)
    return slow_share_F * slow_F + (1 - slow_share_F) * frequency_F, _yarn_factor(parameters)


def _yarn_stretch(parameters: Parameters) -> float:
    """Return `factor`. If it is null, the ratio of the new and the original maximum length."""
    if "factor" not in parameters or parameters["factor"] is not None:
        return _number(parameters, "factor")
    after = _number(parameters, "max_position_embeddings")
    return after / _number(parameters, "original_max_position_embeddings")


def _yarn_factor(parameters: Parameters) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    factor = _yarn_stretch(parameters)
    if factor <= 1:
        return 1.0
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        above, below = _number(parameters, "mscale"), _number(parameters, "mscale_all_dim")
        return (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def _number(
    parameters: Parameters,
    field: str,
    default: float | None = None,
    *,
    zero_is_absent: bool = False,
) -> float:
    value = parameters.get(field)
    if value is None or (zero_is_absent and value == 0):
        value = default
    if not _is_number(value):
        raise ModelError(
            f"config.json: rope type {parameters['rope_type']!r} needs {field} as a positive "
            f"number, got {shorten(value)}: correct rope_parameters (rope_scaling in older files)"
        )
    return float(value)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and _MINIMUM < value < _GREATEST


def _dynamic(parameters: Parameters, rotary_dim: int) -> Frequencies:
    """NTK scaling: theta grows with the length, here always max_model_len.

    transformers uses the length of the longest sequence so far instead, so that its angles change
    during a sequence; both agree for a sequence of max_model_len tokens, and below the original
    length.
    """
    if rotary_dim < 4:
        raise ModelError(
            f"config.json: rope type 'dynamic' requires rotary_dim of at least 4, got {rotary_dim}"
        )
    factor = _number(parameters, "factor")
    original = _number(parameters, "max_position_embeddings")
    length = max(parameters.get("max_model_len") or 0, original)
    stretch = factor * length / original - (factor - 1)
    theta = _number(parameters, "rope_theta") * stretch ** (rotary_dim / (rotary_dim - 2))
    return _default({**parameters, "rope_theta": theta}, rotary_dim)


def _longrope(parameters: Parameters, rotary_dim: int) -> Frequencies:
    """LongRoPE, Ding et al. 2024, arXiv:2402.13753: a divisor for each frequency.

    The long divisors are used if max_model_len is above the original length, otherwise the short
    ones, so that all tokens of all requests have the same angles.
    """
    original = _number(parameters, "original_max_position_embeddings")
    if original == 1:
        raise ModelError(
            "config.json: rope type 'longrope' needs original_max_position_embeddings above 1"
        )
    name = "long_factor" if (parameters.get("max_model_len") or 0) > original else "short_factor"
    divisors = parameters.get(name)
    is_list = isinstance(divisors, list | tuple) and len(divisors) == rotary_dim // 2
    if not is_list or not all(_is_number(value) for value in divisors):
        raise ModelError(
            f"config.json: rope type 'longrope' needs {name} with {rotary_dim // 2} positive "
            f"numbers, got {shorten(divisors)}: correct rope_parameters"
        )
    frequency_F, _ = _default(parameters, rotary_dim)
    factor = parameters.get("factor")
    stretch = (
        _number(parameters, "max_position_embeddings") / original
        if factor is None
        else _number(parameters, "factor")
    )
    if parameters.get("attention_factor") is not None:
        scale = _number(parameters, "attention_factor")
    else:
        scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return frequency_F / torch.tensor(divisors, dtype=torch.float32), scale


def _proportional(parameters: Parameters, rotary_dim: int) -> Frequencies:
    """Only some frequencies rotate features of the head; all others have the angle 0."""
    frequency_F, _ = _default(parameters, rotary_dim)
    num_rotated = int(_number(parameters, "partial_rotary_factor") * rotary_dim // 2)
    frequency_F[num_rotated:] = 0
    return frequency_F / _number(parameters, "factor", 1.0), 1.0


ROPE_TYPES: dict[str, Callable[[Parameters, int], Frequencies]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
