"""Values that plugin classes declare: devices, dtypes and batch invariance.

They are checked when a class is loaded and used by the selection. With a plugin that is not
batch-invariant, the tokens of a seeded request may depend on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces.attention import AttentionCapabilities
from dovetail.interfaces.ops import ROUNDED, overridden_operations
from dovetail.plugin_kinds import get_kind
from dovetail.retired_names import RETIRED_FEATURES, renamed_hint
from dovetail.value_checks import shorten

FEATURE = "batch_invariant"
"""Attention backends declare batch invariance as a feature of this name, other kinds of plugins as
a class attribute of this name."""
SEED_NOTE = (
    "It is not batch-invariant: the tokens of a seeded request may depend on the other "
    "requests in the batch."
)
"""The note to users about a plugin that is not batch-invariant."""

_CAPABILITY_SETS = ("dtypes", "device_types", "kv_cache_dtypes", "features")


def field_problems(kind: str, cls: type[Any]) -> Iterator[str]:
    """Yield problems with the values that a class declares. Missing values are not reported."""
    for name in get_kind(kind).declares:
        yield from _names_problem(name, getattr(cls, name, frozenset()))
    if kind == "ops":
        yield from _dependence_problem(getattr(cls, "batch_dependent", frozenset()))
    if kind == "attention":
        yield from _attention_problems(cls)


def _attention_problems(cls: type[Any]) -> Iterator[str]:
    name: object = getattr(cls, "name", None)
    if not isinstance(name, str) or not name.isprintable() or not name:
        yield f"name is {shorten(name)}; it must be a printable, non-empty string"
    declared: object = getattr(cls, "capabilities", None)
    if not isinstance(declared, AttentionCapabilities):
        yield f"capabilities is {shorten(declared)}; write AttentionCapabilities(…)"
        return
    for field in _CAPABILITY_SETS:
        yield from _names_problem(f"capabilities.{field}", getattr(declared, field))
    features: object = declared.features
    feature_set = features if isinstance(features, (set, frozenset)) else frozenset()
    for feature in sorted(RETIRED_FEATURES.keys() & feature_set):
        hint = renamed_hint(feature, RETIRED_FEATURES)
        yield f"capabilities.features contains {feature!r}.{hint}"
    sizes: object = declared.head_sizes
    if not isinstance(sizes, (set, frozenset)) or not all(map(_is_positive, sizes)):
        yield f"capabilities.head_sizes is {shorten(sizes)}; write a frozenset of positive integers"
    if not _is_positive(declared.block_size_multiple):
        multiple = shorten(declared.block_size_multiple)
        yield f"capabilities.block_size_multiple is {multiple}; write a positive integer"


def _names_problem(name: str, value: object) -> Iterator[str]:
    is_set = isinstance(value, (set, frozenset))
    if not is_set or not all(isinstance(item, str) for item in value):  # type: ignore[attr-defined]
        yield f"{name} is {shorten(value)}; write a frozenset of strings"


def _dependence_problem(value: object) -> Iterator[str]:
    names = sorted(ROUNDED.intersection(value)) if isinstance(value, (set, frozenset)) else []
    if names:
        yield (
            f"batch_dependent contains {', '.join(names)}, which batch_invariant guarantees; "
            "remove the operation, or leave batch_invariant empty and remove batch_dependent"
        )


def _is_positive(value: object) -> bool:
    return type(value) is int and value > 0


def _declared(kind: str, cls: type[Any], name: str) -> frozenset[str]:
    """Return the names that a class declares, or none if its kind does not declare them."""
    names: frozenset[str] = getattr(cls, name) if name in get_kind(kind).declares else frozenset()
    return names


def device_problem(kind: str, cls: type[Any], device_type: str) -> str:
    """Return why a class does not support a device type, or "" if it does.

    device_type: torch's name, such as "cuda"; "" if unknown.
    """
    types = _declared(kind, cls, "device_types")
    if not types or not device_type or device_type in types:
        return ""
    return f"it supports {', '.join(sorted(types))}, but the platform's device is {device_type}"


def dtype_problem(kind: str, cls: type[Any], dtype: str) -> str:
    """Return why a class does not support models of `dtype`, or "" if it does.

    dtype: a name such as "bfloat16"; "" if unknown.
    """
    types = _declared(kind, cls, "dtypes")
    if not types or not dtype or dtype in types:
        return ""
    return f"it supports {', '.join(sorted(types))}, but the dtype of the model is {dtype}"


def promises_equal_bits(kind: str, cls: type[Any], dtype: str) -> bool | None:
    """Return whether `cls` declares batch invariance for models of `dtype`.

    dtype: a name such as "bfloat16"; "" if unknown. Returns None for kinds that do not declare it,
    and if the result depends on an unknown dtype.
    """
    if kind == "attention":
        capabilities = cls.capabilities
        promised = capabilities.dtypes if FEATURE in capabilities.features else frozenset()
    elif kind == "ops":
        # Torch runs the other operations and does not guarantee batch invariance.
        promised = cls.batch_invariant if overridden_operations(cls) >= ROUNDED else frozenset()
    elif FEATURE in get_kind(kind).declares:
        promised = cls.batch_invariant
    else:
        return None
    if not dtype and promised:
        return None
    return dtype in promised


def missing_promise(dtype: str) -> str:
    """Return the reason to reject a class that does not declare batch invariance."""
    return f"it is not batch-invariant in {dtype or 'any dtype'}"
