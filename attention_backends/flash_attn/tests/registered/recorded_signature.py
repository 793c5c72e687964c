"""Functions that have the recorded signature of a provider, and call another implementation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_signature(
    implementation: Callable[..., Any], name: str, lines: Sequence[str]
) -> Callable[..., Any]:
    """Return a function of the given name and parameters that calls `implementation`.

    lines: parameters as in signatures.json. `implementation` receives all of them by keyword. An
    unknown keyword raises TypeError, as for a Python function.
    """
    signature = inspect.Signature([parameter(line) for line in lines])

    @functools.wraps(implementation)
    def function(*args: object, **kwargs: object) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return implementation(**bound.arguments)

    function.__name__ = name
    function.__signature__ = signature
    return function


def parameter(line: str) -> inspect.Parameter:
    """Return the parameter that a line such as "* window_size = (-1, -1)" describes."""
    is_keyword = line.startswith("* ")
    name, _, default = line.removeprefix("* ").partition(" = ")
    value = eval(default, {"torch": torch}) if default else inspect.Parameter.empty
    return inspect.Parameter(name, KEYWORD if is_keyword else POSITIONAL, default=value)
