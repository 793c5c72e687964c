"""Checks whether the signature of one callable is compatible with another.

Callers of a contract pass required parameters by position, so an implementation may rename them.
They pass optional parameters by position or name, and keyword-only parameters by name. A compatible
callable accepts all of these and requires no others. Annotations are ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def find_mismatches(
    expected: Callable[..., Any],
    actual: Callable[..., Any],
    *,
    skip_expected: bool,
    skip_actual: bool,
) -> list[str]:
    """Return the reasons why `actual` does not accept valid calls of `expected`.

    skip_expected, skip_actual: whether the first parameter is a bound `self` or `cls`. A callable
    without a readable signature, such as a builtin, is accepted.
    """
    try:
        required = list(inspect.signature(expected).parameters.values())[skip_expected:]
        actual_parameters = list(inspect.signature(actual).parameters.values())
    except (TypeError, ValueError):
        return []
    if skip_actual and actual_parameters and actual_parameters[0].kind in _POSITIONAL:
        actual_parameters = actual_parameters[1:]
    elif skip_actual and not any(p.kind is Parameter.VAR_POSITIONAL for p in actual_parameters):
        return ["the method has no parameter 'self'"]
    return [
        *_positional_mismatches(required, actual_parameters),
        *_keyword_mismatches(required, actual_parameters),
        *_surplus_demands(required, actual_parameters),
    ]


def _positional_mismatches(required: list[Parameter], actual: list[Parameter]) -> Iterator[str]:
    """Yield problems with parameters that are passed by position."""
    slots = [p for p in actual if p.kind in _POSITIONAL]
    takes_more = any(p.kind is Parameter.VAR_POSITIONAL for p in actual)
    for index, parameter in enumerate(p for p in required if p.kind in _POSITIONAL):
        if index >= len(slots):
            if not takes_more:
                yield f"the method does not take {parameter.name!r}"
            continue
        slot = slots[index]
        if parameter.default is Parameter.empty:
            continue
        if slot.default is Parameter.empty:
            yield f"the method requires {slot.name!r}, which callers may omit"
        elif slot.name != parameter.name and not _takes_any_name(actual):
            yield (
                f"the parameter {slot.name!r} must be called {parameter.name!r}, as in the contract"
            )
    if any(p.kind is Parameter.VAR_POSITIONAL for p in required) and not takes_more:
        yield "the method does not accept *args, but the contract does"


def _keyword_mismatches(required: list[Parameter], actual: list[Parameter]) -> Iterator[str]:
    """Yield problems with parameters that are passed by name."""
    named = {p.name: p for p in actual if p.kind is not Parameter.POSITIONAL_ONLY}
    for parameter in required:
        if parameter.kind is not Parameter.KEYWORD_ONLY:
            continue
        slot = named.get(parameter.name)
        if slot is None and not _takes_any_name(actual):
            yield f"the method does not take the keyword {parameter.name!r}"
        elif slot and slot.default is Parameter.empty and parameter.default is not Parameter.empty:
            yield f"the method requires {slot.name!r}, which callers may omit"
    if _takes_any_name(required) and not _takes_any_name(actual):
        yield "the method does not accept **kwargs, but the contract does"


def _surplus_demands(required: list[Parameter], actual: list[Parameter]) -> Iterator[str]:
    """Yield required parameters that no caller passes."""
    keywords = {p.name for p in required if p.kind is Parameter.KEYWORD_ONLY}
    num_positional = sum(p.kind in _POSITIONAL for p in required)
    slots = [p for p in actual if p.kind in _POSITIONAL]
    surplus = [p for p in slots[num_positional:] if p.name not in keywords]
    surplus += [p for p in actual if p.kind is Parameter.KEYWORD_ONLY and p.name not in keywords]
    for parameter in surplus:
        if parameter.default is Parameter.empty:
            yield f"the method requires {parameter.name!r}, which no caller passes"


def _takes_any_name(parameters: list[Parameter]) -> bool:
    return any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
