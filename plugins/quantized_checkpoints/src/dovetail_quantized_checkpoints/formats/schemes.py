"""The quantization schemes that a compressed-tensors configuration states for weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import WeightError
from dovetail.value_checks import shorten
from dovetail_quantized_checkpoints.formats.base import choice, read_group_size

MAX_SCHEMES = 1000
MAX_BLOCK = 1 << 20
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The quantization of the weights of some layers. Dimensions as in `stored_weight`.

    bits: the bits of a code. block: how many rows and columns share a scale; 0 for all.
    """

    bits: int
    block: tuple[int, int]

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of scales along each dimension of a weight [O, I]."""
        (rows, columns), (num_outputs, num_inputs) = self.block, shape
        return -(-num_outputs // (rows or num_outputs)), -(-num_inputs // (columns or num_inputs))


def read_schemes(table: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Return the schemes of `config_groups`. Raise WeightError for values of a wrong type."""
    groups = table.get("config_groups") or {}
    if not isinstance(groups, Mapping) or len(groups) > MAX_SCHEMES:
        raise WeightError(
            f"quantization_config: config_groups must be an object of up to {MAX_SCHEMES} keys"
        )
    schemes = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise WeightError(
                f"quantization_config: config_groups.{shorten(name)} must have the key 'weights'"
            )
        bits = choice(weights, "num_bits", range(1, 17), 8)
        schemes.append(Scheme(bits=bits, block=_read_block(weights)))
    return tuple(schemes)


def _read_block(weights: Mapping[str, Any]) -> tuple[int, int]:
    group_size = read_group_size(weights)
    default = "channel" if group_size == -1 else "tensor" if group_size is None else "group"
    strategy = choice(weights, "strategy", STRATEGIES, default)
    if strategy == "block":
        return _block_structure(weights.get("block_structure"))
    if strategy in ("group", "tensor_group"):
        if group_size is None or group_size < 1:
            raise WeightError(
                f"quantization_config: the strategy {strategy!r} needs a positive group_size"
            )
        return 1, group_size
    return (0, 0) if strategy == "tensor" else (1, 0)


def _block_structure(value: Any) -> tuple[int, int]:
    parts = value.split("x")[:3] if isinstance(value, str) else value
    if isinstance(value, str):
        parts = [int(part) if part.isdecimal() and len(part) < 8 else 0 for part in parts]
    is_pair = isinstance(parts, (list, tuple)) and [type(size) for size in parts] == [int, int]
    if not is_pair or not all(0 < size < MAX_BLOCK for size in parts):
        raise WeightError(
            f"quantization_config: block_structure is {shorten(value)}; it must be two positive "
            "integers"
        )
    return parts[0], parts[1]
