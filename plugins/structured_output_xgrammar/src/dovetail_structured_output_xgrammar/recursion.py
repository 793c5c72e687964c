"""Checks the references between the definitions of a translated schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_CHAIN = 200
"""Maximum number of definitions, which limits the depth of recursion in the library."""


def check_recursion(definitions: Mapping[str, dict[str, Any]]) -> None:
    """Raise ValueError if a definition has no finite value, or is a part of itself."""
    if len(definitions) > MAX_CHAIN:
        raise ValueError(f"the schema has references to more than {MAX_CHAIN} parts")
    direct = {name: set(_direct(part)) for name, part in definitions.items()}
    while True:
        done = {name for name, names in direct.items() if not names & direct.keys()}
        if not done:
            break
        direct = {name: names for name, names in direct.items() if name not in done}
    if direct:
        raise ValueError("a $ref in the schema refers to itself directly")
    finite: set[str] = set()
    while True:
        new = {name for name, part in definitions.items() if _is_finite(part, finite)} - finite
        if not new:
            break
        finite |= new
    if len(finite) < len(definitions):
        raise ValueError("a $ref in the schema requires an infinitely nested value")


def _direct(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the definitions that `part` names outside of objects and arrays."""
    if "$ref" in part:
        yield str(part["$ref"]).removeprefix("#/$defs/")
    for item in part.get("anyOf", ()):
        yield from _direct(item)


def _is_finite(part: object, finite: set[str]) -> bool:
    """Return whether a part has a finite value if the definitions `finite` have one."""
    if not isinstance(part, dict):
        return True
    if "$ref" in part:
        return part["$ref"].removeprefix("#/$defs/") in finite
    if "anyOf" in part:
        return any(_is_finite(item, finite) for item in part["anyOf"])
    needed = [part["properties"][name] for name in part.get("required", ())]
    needed += part.get("prefixItems", ())
    if part.get("minItems", 0) > len(part.get("prefixItems", ())):
        needed.append(part["items"])
    if part.get("minProperties", 0):
        needed += [part["additionalProperties"], *part.get("patternProperties", {}).values()]
    return all(_is_finite(item, finite) for item in needed)
