"""Translates the keywords of one JSON type to those that xgrammar enforces.

All functions raise ValueError with a message that names the keyword.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dovetail_structured_output_xgrammar.regexes import JSON_SPECIAL, Pattern, translate

MAX_COUNT = 10_000
"""Maximum of minItems and similar keywords."""
MAX_BOUND = 10**15
"""Maximum absolute value of a numeric limit."""
STEPS_OF_ONE = 10**6
"""The library writes numbers between limits with at most six digits after the decimal point."""
MAX_MULTIPLE = 500
MAX_MULTIPLE_RANGE = 10_000

_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
BY_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties"),
            *("minProperties", "maxProperties"),
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "integer": _BOUNDS | {"multipleOf"},
    "number": _BOUNDS,
    "boolean": frozenset(),
    "null": frozenset(),
}
"""The keywords that apply to each type."""

_YEAR, _TIME = "[1-9][0-9]{3}", "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,6})?"
_ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DAY = "((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ATOM = "[A-Za-z0-9_+-]{1,32}"
FORMATS: Mapping[str, str] = {
    "date": f"{_YEAR}-{_DAY}",
    "time": f"{_TIME}{_ZONE}",
    "date-time": f"{_YEAR}-{_DAY}T{_TIME}{_ZONE}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": rf"{_ATOM}(\.{_ATOM})?@([a-z0-9]{{1,16}}(-[a-z0-9]{{1,16}})?\.)+[a-z]{{2,16}}",
}
"""Expressions that match only strings of each format (without the 29th of February)."""


def read_count(schema: Mapping[str, Any], keyword: str) -> int | None:
    """Return the count in a keyword such as minItems, or None if it is absent."""
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{keyword} must be an integer")
    if not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{keyword} must be between 0 and {MAX_COUNT}")
    return int(value)


def read_counts(schema: Mapping[str, Any], minimum: str, maximum: str) -> dict[str, int]:
    """Return the counts in the keywords for a minimum and a maximum, if they are present."""
    requested = {item: read_count(schema, item) for item in (minimum, maximum)}
    counts = {keyword: count for keyword, count in requested.items() if count is not None}
    if counts.get(minimum, 0) > counts.get(maximum, MAX_COUNT):
        raise ValueError(f"{minimum} is greater than {maximum}, so no value is valid")
    return counts


def string(schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the schema of strings, and the size of its pattern."""
    lengths = read_counts(schema, "minLength", "maxLength")
    kinds = [item for item in ("pattern", "format") if item in schema] + list(lengths)[:1]
    if len(kinds) > 1:
        raise ValueError(f"{kinds[0]} is not supported with {kinds[1]}")
    if not kinds:
        return {"type": "string"}, 0
    if lengths:  # the library's own limits of the length permit control characters
        limits = f"{{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}}"
        pattern = translate(rf"[^\n]{limits}", JSON_SPECIAL)
    else:
        pattern = read_pattern(schema[kinds[0]], kinds[0])
    if not pattern.text:
        return {"enum": [""]}, 0
    return {"type": "string", "pattern": pattern.written()}, pattern.size


def read_pattern(value: object, keyword: str = "pattern") -> Pattern:
    """Return the expression of a pattern or of a format. It must match the whole text."""
    if not isinstance(value, str):
        raise ValueError(f"{keyword} must be a string")
    if keyword == "pattern":
        return translate(value, JSON_SPECIAL, search=True)
    if value not in FORMATS:
        raise ValueError(f"the format {value[:40]!r} is not one of {', '.join(sorted(FORMATS))}")
    return translate(FORMATS[value], JSON_SPECIAL)


def number(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of numbers."""
    bounds = {item: _bound(schema, item) for item in sorted(_BOUNDS) if item in schema}
    steps = {item: Fraction(bound) * STEPS_OF_ONE for item, bound in bounds.items()}
    low = [math.ceil(steps["minimum"])] if "minimum" in steps else []
    low += [math.floor(steps[step]) + 1 for step in steps if step == "exclusiveMinimum"]
    high = [math.floor(steps["maximum"])] if "maximum" in steps else []
    high += [math.ceil(steps[step]) - 1 for step in steps if step == "exclusiveMaximum"]
    if low and high and max(low) > min(high):
        raise ValueError(
            "no number with six digits after the decimal point is between minimum and maximum"
        )
    return {"type": "number", **bounds}


def integer(schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the schema of integers with inclusive limits, and the size of their automaton."""
    low = [math.ceil(_bound(schema, "minimum"))] if "minimum" in schema else []
    if "exclusiveMinimum" in schema:
        low.append(math.floor(_bound(schema, "exclusiveMinimum")) + 1)
    high = [math.floor(_bound(schema, "maximum"))] if "maximum" in schema else []
    if "exclusiveMaximum" in schema:
        high.append(math.ceil(_bound(schema, "exclusiveMaximum")) - 1)
    bounds = {"minimum": max(low)} if low else {}
    bounds |= {"maximum": min(high)} if high else {}
    if low and high and bounds["minimum"] > bounds["maximum"]:
        raise ValueError("minimum is greater than maximum, so no integer is valid")
    if "multipleOf" not in schema:
        return {"type": "integer", **bounds}, 0
    step = schema["multipleOf"]
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= MAX_MULTIPLE:
        raise ValueError(f"multipleOf must be an integer from 1 to {MAX_MULTIPLE}")
    if not bounds:
        return {"type": "integer", "multipleOf": step}, 20 * step  # ten rules for each remainder
    if len(bounds) < 2 or bounds["maximum"] - bounds["minimum"] > MAX_MULTIPLE_RANGE:
        raise ValueError(
            "multipleOf is supported without limits, or between a minimum and a maximum at most "
            f"{MAX_MULTIPLE_RANGE} apart"
        )
    first = -(-bounds["minimum"] // step) * step
    multiples = list(range(first, bounds["maximum"] + 1, step))
    if not multiples:
        raise ValueError("multipleOf: the limits contain no multiple")
    return {"enum": multiples}, len(multiples)


def _bound(schema: Mapping[str, Any], keyword: str) -> int | float:
    value: object = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{keyword} must be a number")
    if not -MAX_BOUND <= value <= MAX_BOUND:
        raise ValueError(f"{keyword} must be between -{MAX_BOUND} and {MAX_BOUND}")
    return value
