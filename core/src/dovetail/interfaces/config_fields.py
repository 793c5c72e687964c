"""The base class of configuration sections, and the types of their fields.

The validator of a type returns the value in its normal form or raises ValueError with the accepted
values. `ConfigNode` adds the name and value of the field to the error.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
)

from dovetail.errors import ConfigError, nearest
from dovetail.interfaces.frozen_mapping import freeze
from dovetail.interfaces.kv_cache import DTYPE_BYTES
from dovetail.value_checks import shorten

MAX_SECONDS = 86_400
MAX_GIGABYTES = 2**20
MAX_ERRORS_SHOWN = 3
AUTO = "auto"
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


class ConfigNode(BaseModel):
    """A frozen configuration section. Unknown fields and invalid values raise ConfigError."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="constants"
    )

    def __init__(self, **values: Any) -> None:
        """Check `values`. Raise ConfigError with the field, its value and the accepted values."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _translate(error, type(self)) from None

    @classmethod
    def model_validate(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a section from a mapping. Raises ConfigError if a value is not valid."""
        try:
            return super().model_validate(*args, **kwargs)
        except ValidationError as error:
            raise _translate(error, cls) from None

    @classmethod
    def model_validate_json(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a section from JSON text. Raises ConfigError if a value is not valid."""
        try:
            return super().model_validate_json(*args, **kwargs)
        except ValidationError as error:
            raise _translate(error, cls) from None


def normal_dtype_name(value: object) -> str:
    """Return the canonical name of a dtype: "half" and torch.float16 are both "float16"."""
    name = str(value).removeprefix("torch.")
    return _SYNONYMS.get(name, name)


def reference_name(value: object) -> object:
    """Return a class as "module:Qualified.Name" and any other value unchanged."""
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else value


def integer(low: int, high: int, *, optional: bool = False) -> BeforeValidator:
    """Accept an integer in [low, high] but not a bool. Also None if `optional`."""
    expected = f"must be {'None or ' if optional else ''}an integer from {low} to {high}"

    def check(value: Any) -> int | None:
        if optional and value is None:
            return None
        try:
            number = operator.index(value)
        except TypeError:
            raise ValueError(expected) from None
        if isinstance(value, bool) or not low <= number <= high:
            raise ValueError(expected)
        return number

    return BeforeValidator(check)


def integers(low: int, high: int, most: int) -> BeforeValidator:
    """Accept a list of at most `most` integers in [low, high] or digit strings. Sort them."""
    expected = f"must be a list of at most {most} integers from {low} to {high}"

    def check(value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > most:
            raise ValueError(expected)
        numbers = set()
        for item in value:
            # Command-line arguments are strings.
            is_text = isinstance(item, str) and item.isascii() and item.isdigit() and len(item) < 20
            number = int(item) if is_text else item
            if type(number) is not int or not low <= number <= high:
                raise ValueError(expected)
            numbers.add(number)
        return tuple(sorted(numbers))

    return BeforeValidator(check)


def exactly(only: int, reason: str) -> BeforeValidator:
    """Accept only the integer `only`, because other values are not supported yet."""

    def check(value: object) -> int:
        if isinstance(value, bool) or value != only:
            raise ValueError(f"is not supported: {reason}. Set it to {only}")
        return only

    return BeforeValidator(check)


def dtype_name(names: tuple[str, ...], *, resolved: bool = False) -> BeforeValidator:
    """Accept one of `names` or a synonym, and "auto" unless `resolved`."""
    accepted = names if resolved else (AUTO, *names)
    listed = ", ".join(names)
    expected = f"must be one of {listed}" if resolved else f'must be "auto" or one of {listed}'

    def check(value: object) -> str:
        name = normal_dtype_name(value)
        if name not in accepted:
            raise ValueError(expected)
        return name

    return BeforeValidator(check)


def one_of(*names: str, optional: bool = False) -> BeforeValidator:
    """Accept one of `names`; also None if `optional`."""
    expected = f"must be {'None or ' if optional else ''}one of {', '.join(names)}"

    def check(value: object) -> str | None:
        if optional and value is None:
            return None
        if not isinstance(value, str) or value not in names:
            raise ValueError(expected)
        return value

    return BeforeValidator(check)


def flag(*, optional: bool = False) -> BeforeValidator:
    """Accept a bool. Also None if `optional`."""
    expected = f"must be {'None, ' if optional else ''}True or False"

    def check(value: object) -> object:
        if isinstance(value, bool) or (optional and value is None):
            return value
        raise ValueError(expected)

    return BeforeValidator(check)


def share(*, optional: bool = False) -> BeforeValidator:
    """Accept a number in (0, 1] but not a bool. Also None if `optional`."""
    expected = (
        f"must be {'None or ' if optional else ''}a positive fraction of at most 1, such as 0.9"
    )

    def check(value: Any) -> float | None:
        if optional and value is None:
            return None
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        # The comparison is also False for NaN.
        if not real or not 0.0 < value <= 1.0:
            raise ValueError(expected)
        return float(value)

    return BeforeValidator(check)


def _seconds(value: Any) -> float:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not 0.0 < value <= MAX_SECONDS:
        raise ValueError(f"must be a positive number of seconds, at most {MAX_SECONDS}")
    return float(value)


def _gigabytes(value: Any) -> float:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not 0.0 <= value <= MAX_GIGABYTES:
        raise ValueError(f"must be a number of GiB from 0 to {MAX_GIGABYTES}")
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
        raise ValueError(
            "must be a class with a metaclass that does not override __eq__ or __hash__"
        )
    return value


def _not_auto(value: object) -> object:
    if value == AUTO:
        raise ValueError("is not resolved; set the name of a plugin")
    return value


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


def _references(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list of plugins, each a name or a class")
    return tuple(value)


def _rules(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of rules, each as 'kind:name@distribution'")
    return tuple(value)


def _mapping(value: object) -> object:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping with strings as keys")
    return value


Flag = Annotated[bool, flag()]
OptionalFlag = Annotated[bool | None, flag(optional=True)]
Share = Annotated[float, share()]
OptionalShare = Annotated[float | None, share(optional=True)]
Rules = Annotated[tuple[str, ...], BeforeValidator(_rules)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Gigabytes = Annotated[float, BeforeValidator(_gigabytes)]
Text = Annotated[str, BeforeValidator(_text)]
FrozenMapping = Annotated[Mapping[str, Any], BeforeValidator(_mapping), AfterValidator(freeze)]
PluginReference = Annotated[
    str | type, BeforeValidator(_reference), PlainSerializer(reference_name, when_used="json")
]
OpenReference = Annotated[
    str | type | None,
    BeforeValidator(_reference),
    PlainSerializer(reference_name, when_used="json"),
]
"""A plugin or "auto" in a requested section. None is valid only in the resolved section."""
ChosenReference = Annotated[PluginReference, AfterValidator(_not_auto)]
"""A plugin in a resolved configuration: never "auto"."""
OptionalReference = Annotated[PluginReference | None, BeforeValidator(_none_if_empty)]
"""A plugin, or None; an empty string is None."""
PluginReferences = Annotated[tuple[PluginReference, ...], BeforeValidator(_references)]


def _translate(error: ValidationError, node: type[ConfigNode]) -> ConfigError:
    """Return a ConfigError with one line for each of pydantic's errors."""
    details = error.errors(include_url=False)
    lines = [_sentence(detail, node) for detail in details[:MAX_ERRORS_SHOWN]]
    if len(details) > MAX_ERRORS_SHOWN:
        lines[-1] += f" (and {len(details) - MAX_ERRORS_SHOWN} more)"
    return ConfigError("\n".join(lines))


def _sentence(detail: Mapping[str, Any], node: type[ConfigNode]) -> str:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    *_, name = detail["loc"] or (node.__name__,)
    if isinstance(name, int):
        name = f"{detail['loc'][-2]}[{name}]"
    if detail["type"] == "extra_forbidden":
        return f"Unknown field {name!r} in {node.__name__}.{nearest(name, node.model_fields)}"
    if detail["type"] == "missing":
        return f"{name} is missing in {node.__name__}; set it."
    text = str(cause) if cause else f"is not valid: {detail['msg']}"
    return f"{name}={shorten(detail['input'])} {text}."
