"""Checks of what classes declare as values: the types of fields that choosing relies on.

A wrong one ("cpu" where a frozenset is due) is found when the class is loaded, not when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.interfaces.attention import AttentionCapabilities
from dovetail.retired_names import RETIRED_FEATURES, renamed_hint
from dovetail.value_checks import shorten

_NAME_SETS: Mapping[str, tuple[str, ...]] = {
    "compile_backend": ("device_types",),
    "linear_method": ("device_types", "dtypes", "batch_invariant"),
    "ops": ("device_types", "batch_invariant"),
    "worker": ("device_types",),
}
_CAPABILITY_SETS = ("dtypes", "device_types", "kv_cache_dtypes", "features")


def field_problems(kind: str, cls: type[Any]) -> Iterator[str]:
    """Yield what is wrong with the values that a class declares; absent ones are told elsewhere."""
    for name in _NAME_SETS.get(kind, ()):
        yield from _names_problem(name, getattr(cls, name, frozenset()))
    if kind == "attention":
        yield from _attention_problems(cls)


def _attention_problems(cls: type[Any]) -> Iterator[str]:
    name: object = getattr(cls, "name", None)
    if not isinstance(name, str) or not name.isprintable() or not name:
        yield f"name is {shorten(name)}; write a string"
    found: object = getattr(cls, "capabilities", None)
    if not isinstance(found, AttentionCapabilities):
        yield f"capabilities is {shorten(found)}; write AttentionCapabilities(…)"
        return
    for field in _CAPABILITY_SETS:
        yield from _names_problem(f"capabilities.{field}", getattr(found, field))
    features: object = found.features
    given = features if isinstance(features, (set, frozenset)) else frozenset()
    for feature in sorted(RETIRED_FEATURES.keys() & given):
        hint = renamed_hint(feature, RETIRED_FEATURES)
        yield f"capabilities.features names {feature!r}.{hint}"
    sizes: object = found.head_sizes
    if not isinstance(sizes, (set, frozenset)) or not all(map(_is_positive, sizes)):
        yield f"capabilities.head_sizes is {shorten(sizes)}; write a frozenset of positive integers"
    if not _is_positive(found.block_size_multiple):
        multiple = shorten(found.block_size_multiple)
        yield f"capabilities.block_size_multiple is {multiple}; write a positive integer"


def _names_problem(name: str, value: object) -> Iterator[str]:
    is_set = isinstance(value, (set, frozenset))
    if not is_set or not all(isinstance(one, str) for one in value):  # type: ignore[attr-defined]
        yield f"{name} is {shorten(value)}; write a frozenset of strings"


def _is_positive(value: object) -> bool:
    return type(value) is int and value > 0
