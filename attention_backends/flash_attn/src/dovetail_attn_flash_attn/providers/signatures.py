"""Compares the signatures of an installed provider with the recorded ones.

A kernel misreads its arguments if a parameter was added, removed or moved, so a provider with
a different signature is rejected. `signatures.json` contains, for each provider and function, the
accepted signatures with their sources.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from dovetail_attn_flash_attn.providers.provider import ProviderError

FIXTURE = "signatures.json"


@cache
def recorded(provider: str, function: str) -> Mapping[str, tuple[str, ...]]:
    """Return the accepted signatures by source, as one line for each parameter."""
    text = files("dovetail_attn_flash_attn.providers").joinpath(FIXTURE).read_text("utf-8")
    return {source: tuple(lines) for source, lines in json.loads(text)[provider][function].items()}


def lines_of_function(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return one line for each parameter: its name and default, "*" before keyword-only ones."""
    lines = []
    for parameter in inspect.signature(function).parameters.values():
        star = "* " if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
        has_default = parameter.default is not inspect.Parameter.empty
        default = f" = {parameter.default!r}" if has_default else ""
        lines.append(f"{star}{parameter.name}{default}")
    return tuple(lines)


def lines_of_operator(operator: Any) -> tuple[str, ...]:
    """Return one line for each argument of a torch operator: type, name and default."""
    lines = []
    for argument in operator.default._schema.arguments:
        default = f" = {argument.default_value!r}" if argument.has_default_value() else ""
        lines.append(f"{argument.type} {argument.name}{default}")
    return tuple(lines)


def check_function(provider: str, function: Callable[..., Any]) -> None:
    """Raise ProviderError unless a Python function has a recorded signature."""
    _check(provider, function.__name__, lines_of_function(function))


def check_operator(provider: str, namespace: str, name: str) -> None:
    """Raise ProviderError unless an operator is registered with a recorded schema."""
    operator = getattr(getattr(torch.ops, namespace), name, None)
    if operator is None:
        raise ProviderError(f"torch.ops.{namespace}.{name} is not registered after the import")
    _check(provider, name, lines_of_operator(operator))


def _check(provider: str, function: str, installed: Sequence[str]) -> None:
    accepted = recorded(provider, function)
    if tuple(installed) in accepted.values():
        return
    raise ProviderError(
        f"the installed {function} does not have the signature of a supported version "
        f"({', '.join(accepted)}): {_difference(list(accepted.values()), installed)}"
    )


def _difference(accepted: Sequence[Sequence[str]], installed: Sequence[str]) -> str:
    """Return what differs from the most similar accepted signature."""
    nearest = min(accepted, key=lambda lines: len(set(lines) ^ set(installed)))
    added = [line for line in installed if line not in nearest]
    missing = [line for line in nearest if line not in installed]
    parts = [f"added {', '.join(added)}"] if added else []
    parts += [f"missing {', '.join(missing)}"] if missing else []
    return "; ".join(parts) or "the order of the parameters differs"
