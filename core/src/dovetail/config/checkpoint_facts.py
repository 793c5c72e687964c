"""What config.json states about a checkpoint's dtype and longest sequence.

Reads the mapping only; decides nothing: `dovetail.config.resolve` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.config.field_types import normal_dtype_name
from dovetail.errors import ModelError

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_STRETCHED = ("linear", "dynamic")
"""Rope types whose max_position_embeddings is the length before stretching."""


def stated_dtype(hf_config: Mapping[str, Any]) -> str | None:
    """Return the dtype that config.json states, by our name for it; None if it states none."""
    value = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return normal_dtype_name(value) if value else None


def stated_max_model_len(hf_config: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the longest sequence in tokens and where that is stated; None if nowhere.

    Rope types linear and dynamic: the stated length times factor; yarn: the original length times
    factor; llama3, longrope and others: the stated length is the long one already.
    Raises ModelError, naming the key, for a length or factor that is none.
    """
    name = next((key for key in _LENGTH_NAMES if hf_config.get(key) is not None), None)
    if name is None:
        return None
    length = _positive(hf_config, name, whole=True)
    rope = _rope_table(hf_config)
    kind = rope.get("rope_type", rope.get("type"))
    if rope.get("factor") is None or kind not in (*_STRETCHED, "yarn"):
        return int(length), name
    factor = _positive(rope, "factor")
    original = "original_max_position_embeddings"
    # A length beside the rope parameters, where a config has it, is the one that counts.
    table = hf_config if hf_config.get(original) is not None else rope
    if kind == "yarn" and table.get(original) is not None:
        name, length = original, _positive(table, original, whole=True)
    return math.floor(length * factor), f"{name} times the factor {factor:g} of {kind} rope"


def _rope_table(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope parameters, the old form (which users override) first; empty if none.

    Tables by layer type state no length of the whole model, so they count as none.
    """
    for key in ("rope_scaling", "rope_parameters"):
        table = hf_config.get(key)
        if isinstance(table, Mapping) and table:
            return {} if any(isinstance(inner, Mapping) for inner in table.values()) else table
    return {}


def _positive(table: Mapping[str, Any], key: str, *, whole: bool = False) -> float:
    value = table[key]
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or not 0 < value < math.inf:
        kind = "a positive integer" if whole else "a positive number"
        raise ModelError(
            f"{key}={value!r} of config.json must be {kind}; correct the file or use hf_overrides."
        )
    number: float = value
    return number
