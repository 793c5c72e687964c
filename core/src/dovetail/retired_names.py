"""The names that this release renamed, and errors that give the new name.

Only code that uses an old name reaches this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

_ATTENTION = {"AttentionAsk": "AttentionRequirements", "Rotation": "RotaryArgs"}
_POLICY = {"Displace": "PreemptAndAdmit", "Wish": "Action", "WishKind": "ActionKind"}
_GRAMMAR = {"GrammarAsk": "GrammarSpec"}
_REQUEST = {"Pace": "SharedStepCounter", "STANDING": "STATIC_COUNTER"}

RETIRED_IMPORTS: Mapping[str, Mapping[str, str]] = {
    "dovetail.interfaces": _ATTENTION | _POLICY | _GRAMMAR,
    "dovetail.interfaces.attention": _ATTENTION,
    "dovetail.interfaces.grammar": _GRAMMAR,
    "dovetail.interfaces.policy": _POLICY,
    "dovetail.request": _REQUEST,
}
"""Maps each module to its renamed names: old name to new name."""

RETIRED_FEATURES: Mapping[str, str] = {"counts_on": "supports_advance"}
"""Renamed features of `AttentionCapabilities`: old name to new name."""


def reject_retired(module: str) -> Callable[[str], NoReturn]:
    """Return a `__getattr__` for a module with renamed names. It always raises.

    For an old name it raises ImportError with the new name, because `from module import name` would
    drop the message of an AttributeError. For any other name it raises the usual AttributeError.
    """
    renamed = RETIRED_IMPORTS[module]

    def reject(name: str) -> NoReturn:
        if name in renamed:
            new = renamed[name]
            raise ImportError(f"{module}.{name} was renamed. Use {module}.{new}.", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return reject


def renamed_hint(name: object, renamed: Mapping[str, str]) -> str:
    """Return " It was renamed. Use 'x'." for an old name, or an empty string."""
    new = renamed.get(name) if isinstance(name, str) else None
    return f" It was renamed; use {new!r}." if new else ""
