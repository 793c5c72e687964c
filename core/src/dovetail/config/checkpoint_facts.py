"""The dtype and the longest sequence that config.json states for a checkpoint.

This module reads the mapping only; `dovetail.config.resolve` makes the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ModelError
from dovetail.interfaces.config_fields import normal_dtype_name

_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
)
_STRETCHED_LENGTH_NAMES = ("max_sequence_length", "model_max_length")
"""Keys of config.json that may state the length after linear RoPE scaling."""
_ROTARY_NAMES = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
    "partial_rotary_factor",
)


@dataclass(frozen=True, kw_only=True)
class StatedLength:
    """The longest sequence according to config.json.

    tokens: the default max_model_len. maximum: the largest max_model_len that a user may set.
    source: the key in config.json. fields: all lengths in config.json, by key. can_be_raised:
    whether a larger value of these fields only adds positions, because positions are rotary and no
    angle depends on the length.
    """

    tokens: int
    maximum: int
    source: str
    fields: Mapping[str, int]
    can_be_raised: bool


def stated_dtype(hf_config: Mapping[str, Any]) -> str | None:
    """Return the canonical name of the dtype in config.json, or None if it has no dtype."""
    value = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return normal_dtype_name(value) if value else None


def stated_max_model_len(hf_config: Mapping[str, Any]) -> StatedLength | None:
    """Return the longest sequence that config.json states, or None if it states no length.

    Of several stated lengths the smallest is used. By rope type: dynamic: the stated length times
    factor. yarn: the original length times factor, or the stated length without a factor. linear:
    the stated length, which is often the length after scaling, unless the config also states the
    original or the scaled length; a user may request up to the stated length times factor. llama3,
    longrope and others: the stated length.
    Raises ModelError, naming the key, for a value that is not a length or a factor.
    """
    stated = {
        name: int(_positive(hf_config, name, whole=True))
        for name in _LENGTH_NAMES
        if hf_config.get(name) is not None
    }
    if not stated:
        return None
    field = min(stated, key=lambda name: stated[name])
    rope = _rope_table(hf_config)
    kind = rope.get("rope_type", rope.get("type"))
    is_rotary = any(hf_config.get(name) is not None for name in _ROTARY_NAMES)
    length = StatedLength(
        tokens=stated[field],
        maximum=stated[field],
        source=field,
        fields=stated,
        can_be_raised=is_rotary and kind in (None, "default", "linear", "llama3"),
    )
    if rope.get("factor") is None or kind not in _STRETCHES:
        return length
    factor = _positive(rope, "factor")
    return _STRETCHES[kind](hf_config, rope, length, factor)


def _stretch_dynamic(
    hf_config: Mapping[str, Any], rope: Mapping[str, Any], length: StatedLength, factor: float
) -> StatedLength:
    return _times(length, length.source, length.tokens, factor, "dynamic")


def _stretch_yarn(
    hf_config: Mapping[str, Any], rope: Mapping[str, Any], length: StatedLength, factor: float
) -> StatedLength:
    original = _original_length(hf_config, rope)
    if original is None:
        return _times(length, length.source, length.tokens, factor, "yarn")
    return _times(length, _ORIGINAL, original, factor, "yarn")


def _stretch_linear(
    hf_config: Mapping[str, Any], rope: Mapping[str, Any], length: StatedLength, factor: float
) -> StatedLength:
    original = _original_length(hf_config, rope)
    if original is not None:
        longer = _times(length, _ORIGINAL, original, factor, "linear")
        return max(length, longer, key=lambda item: item.tokens)
    maximum = max(length.tokens, math.floor(length.tokens * factor))
    for name in _STRETCHED_LENGTH_NAMES:
        if hf_config.get(name) is not None:
            tokens = int(_positive(hf_config, name, whole=True))
            if length.tokens < tokens <= maximum:
                return replace(length, tokens=tokens, maximum=maximum, source=name)
    return replace(length, maximum=maximum)


_STRETCHES = {"dynamic": _stretch_dynamic, "yarn": _stretch_yarn, "linear": _stretch_linear}
_ORIGINAL = "original_max_position_embeddings"


def _original_length(hf_config: Mapping[str, Any], rope: Mapping[str, Any]) -> int | None:
    # A length next to the rope parameters takes precedence.
    table = hf_config if hf_config.get(_ORIGINAL) is not None else rope
    return None if table.get(_ORIGINAL) is None else int(_positive(table, _ORIGINAL, whole=True))


def _times(length: StatedLength, name: str, tokens: int, factor: float, kind: str) -> StatedLength:
    stretched = max(1, math.floor(tokens * factor))
    source = f"{name} times the factor {factor:g} of {kind} rope"
    return replace(length, tokens=stretched, maximum=stretched, source=source)


def _rope_table(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope parameters, or {}.

    If config.json has both `rope_scaling` and `rope_parameters`, the former is used, because users
    override it. Parameters for single layer types are ignored: they do not state the length of the
    whole model.
    """
    for key in ("rope_scaling", "rope_parameters"):
        table = hf_config.get(key)
        if isinstance(table, Mapping) and table:
            return {} if any(isinstance(inner, Mapping) for inner in table.values()) else table
    return {}


def _positive(table: Mapping[str, Any], key: str, *, whole: bool = False) -> float:
    value = table[key]
    valid = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not valid or not 0 < value < math.inf:
        kind = "a positive integer" if whole else "a positive number"
        raise ModelError(
            f"{key}={value!r} of config.json must be {kind}; correct the file or use hf_overrides."
        )
    number: float = value
    return number
