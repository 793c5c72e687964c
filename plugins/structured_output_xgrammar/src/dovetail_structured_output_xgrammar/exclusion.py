"""Checks whether translated schemas exclude each other, so that `oneOf` equals `anyOf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

_MAX_STEPS = 50_000
_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})


def exclude_each_other(
    options: Sequence[dict[str, Any]], definitions: Mapping[str, dict[str, Any]]
) -> bool:
    """Return whether no value is valid for two of the options, or False if it is not certain."""
    return _Comparison(definitions).excludes_all(options)


class _Comparison:
    def __init__(self, definitions: Mapping[str, dict[str, Any]]) -> None:
        self._definitions = definitions
        self._steps_left = _MAX_STEPS

    def excludes_all(self, options: Sequence[dict[str, Any]]) -> bool:
        return all(self._excludes(item, other, ()) for item, other in combinations(options, 2))

    def _excludes(
        self, first: dict[str, Any], second: dict[str, Any], path: tuple[str, ...]
    ) -> bool:
        self._steps_left -= 1
        if self._steps_left < 0:
            return False
        for item, other in ((first, second), (second, first)):
            if "$ref" in item:
                name = item["$ref"].removeprefix("#/$defs/")
                if path.count(name) > 1:  # both may refer to the same recursive definition
                    return False
                return self._excludes(self._definitions[name], other, (*path, name))
            if "anyOf" in item:
                return all(self._excludes(option, other, path) for option in item["anyOf"])
        if "enum" in first and "enum" in second:
            return not any(value in second["enum"] for value in first["enum"])
        if not _types(first) & _types(second):
            return True
        if first.get("type") != "object" or second.get("type") != "object":
            return False
        shared = set(first.get("required", ())) & set(second.get("required", ()))
        parts = [(first["properties"][name], second["properties"][name]) for name in sorted(shared)]
        return any(self._excludes(item, other, path) for item, other in parts)


def _types(part: Mapping[str, Any]) -> frozenset[str]:
    if "enum" in part:
        return frozenset(_type_of(value) for value in part["enum"])
    kind = part.get("type")
    return _TYPES if kind is None else frozenset({"number" if kind == "integer" else kind})


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")
