"""The block type of each layer, and its number of bits."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail_quantize.rounding import BLOCK_TYPES, type_that_fits

PLAIN = "BF16"
SENSITIVE = "Q8_0"
"""The block type of layers that are kept at 8 bits."""


def pick_type(names: Sequence[str], in_features: int) -> str:
    """Return the first of `names` whose blocks divide the rows of a layer, or BF16."""
    return type_that_fits(names, in_features) or PLAIN


def bits_of(type_name: str) -> float:
    """Return the number of bits per stored weight, including its share of the scales."""
    return 16.0 if type_name == PLAIN else BLOCK_TYPES[type_name].bits_per_weight
