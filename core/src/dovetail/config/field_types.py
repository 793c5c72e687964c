"""The kinds of value that a config field may have, each with the words of its refusal.

Every check returns the value in its one normal form or raises ValueError with what would do; the
tree puts the field's name and value before it. Knows no field.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

from dovetail.config.frozen_mapping import freeze
from dovetail.interfaces.kv_cache import DTYPE_BYTES

MAX_SECONDS = 86_400
MODEL_DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = tuple(name for name in DTYPE_BYTES if name != "float64")

_SYNONYMS = {
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
}


def normal_dtype_name(value: object) -> str:
    """Return the name that we use for a dtype: "half" and torch.float16 are both "float16"."""
    name = str(value).removeprefix("torch.")
    return _SYNONYMS.get(name, name)


def reference_name(value: object) -> object:
    """Return a class as "module:Qualified.Name"; anything else as it is."""
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else value


def integer(low: int, high: int, *, optional: bool = False) -> BeforeValidator:
    """Check for an integer in [low, high], bool excluded; `optional`: or None."""
    wanted = f"must be {'None or ' if optional else ''}an integer from {low} to {high}"

    def check(value: Any) -> int | None:
        if optional and value is None:
            return None
        try:
            number = operator.index(value)
        except TypeError:
            raise ValueError(wanted) from None
        if isinstance(value, bool) or not low <= number <= high:
            raise ValueError(wanted)
        return number

    return BeforeValidator(check)


def exactly(only: int, reason: str) -> BeforeValidator:
    """Check for the one integer that is supported so far."""

    def check(value: object) -> int:
        if isinstance(value, bool) or value != only:
            raise ValueError(f"is not supported: {reason}. Leave it at {only}")
        return only

    return BeforeValidator(check)


def dtype_name(names: tuple[str, ...]) -> BeforeValidator:
    """Check for "auto" or one of `names`, after synonyms."""

    def check(value: object) -> str:
        name = normal_dtype_name(value)
        if name != "auto" and name not in names:
            raise ValueError(f'must be "auto" or one of {", ".join(names)}')
        return name

    return BeforeValidator(check)


def _flag(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def _optional_flag(value: object) -> object:
    if value is not None and not isinstance(value, bool):
        raise ValueError("must be None, True or False")
    return value


def _share(value: Any) -> float | None:
    if value is None:
        return None
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN fails the comparison, as it should.
    if not real or not 0.0 < value <= 1.0:
        raise ValueError("must be None or a share above 0 and at most 1, such as 0.9")
    return float(value)


def _seconds(value: Any) -> float:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not 0.0 < value <= MAX_SECONDS:
        raise ValueError(f"must be a number of seconds above 0 and at most {MAX_SECONDS}")
    return float(value)


def _text(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a string of at least one character")
    return value


def _reference(value: object) -> object:
    if not isinstance(value, type) and (not isinstance(value, str) or not value.strip()):
        raise ValueError(
            "must name a plugin (name, name@distribution, pkg.mod:Class) or be a class"
        )
    meta = type(value)
    if isinstance(value, type) and (meta.__eq__, meta.__hash__) != (type.__eq__, type.__hash__):
        raise ValueError("must be a class whose metaclass leaves __eq__ and __hash__ as they are")
    return value


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


def _references(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list of plugins, each a name or a class")
    return tuple(value)


def _rules(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ValueError("must be a list of rules, each as 'kind:name@distribution'")
    return tuple(value)


def _mapping(value: object) -> object:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping with strings as keys")
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]
OptionalFlag = Annotated[bool | None, BeforeValidator(_optional_flag)]
OptionalShare = Annotated[float | None, BeforeValidator(_share)]
Rules = Annotated[tuple[str, ...], BeforeValidator(_rules)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Text = Annotated[str, BeforeValidator(_text)]
FrozenMapping = Annotated[Mapping[str, Any], BeforeValidator(_mapping), AfterValidator(freeze)]
PluginReference = Annotated[
    str | type, BeforeValidator(_reference), PlainSerializer(reference_name, when_used="json")
]
OptionalReference = Annotated[PluginReference | None, BeforeValidator(_none_if_empty)]
"""A plugin, or None; an empty string is None."""
PluginReferences = Annotated[tuple[PluginReference, ...], BeforeValidator(_references)]
