"""Refuses JSON schemas that xgrammar would not enforce.

The library ignores some keywords, and others depending on their neighbors: a keyword applies only
beside its explicit `type`, and `$ref`, `anyOf` and `enum` hide their neighbors. A schema may
therefore use only the combinations that this module lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
MAX_NODES = 20_000

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$comment", "$defs", "definitions"),
    }
)
"""Keywords that restrict nothing."""

BY_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"pattern"}),  # a length would permit control characters
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""The keywords that apply beside each type."""

ALONE = ("$ref", "anyOf", "enum", "const")
"""Keywords beside which only annotations may stand."""


def check_schema(schema: Any) -> None:
    """Raise ValueError, naming the keyword, unless the library enforces the whole schema."""
    _Checker().check(schema, 0)


class _Checker:
    def __init__(self) -> None:
        self._nodes_left = MAX_NODES

    def check(self, schema: Any, depth: int) -> None:
        self._nodes_left -= 1
        if depth > MAX_DEPTH or self._nodes_left < 0:
            raise ValueError(
                f"the schema is nested more than {MAX_DEPTH} levels deep, or has more than "
                f"{MAX_NODES} parts"
            )
        if schema is True:
            return
        if not isinstance(schema, Mapping):
            raise ValueError("each part of a JSON schema must be an object or true")
        for group in ("$defs", "definitions"):
            self._check_each(schema.get(group, {}), group, depth)
        self._check_keywords(schema, depth)

    def _check_keywords(self, schema: Mapping[str, Any], depth: int) -> None:
        keywords = schema.keys() - ANNOTATIONS
        for alone in ALONE:
            if alone in keywords:
                self._refuse_others(keywords - {alone, "type"}, f"beside {alone}")
                self._check_alone(alone, schema, depth)
                return
        kind = schema.get("type")
        if kind is None or isinstance(kind, list):
            self._refuse_others(keywords - {"type"}, "without one type")
            return
        if not isinstance(kind, str) or kind not in BY_TYPE:
            raise ValueError(f"the type {str(kind)[:40]!r} is not known")
        self._refuse_others(keywords - BY_TYPE[kind] - {"type"}, f"for the type {kind}")
        if kind == "object":
            self._check_object(schema, depth)
        elif kind == "array" and "items" in schema:
            self.check(schema["items"], depth + 1)

    def _check_alone(self, keyword: str, schema: Mapping[str, Any], depth: int) -> None:
        value = schema[keyword]
        if keyword == "anyOf":
            if not isinstance(value, list) or not value:
                raise ValueError("anyOf must be a list of schemas")
            for one in value:
                self.check(one, depth + 1)
        if keyword in ("anyOf", "$ref") and "type" in schema:
            raise ValueError(f"type is not supported beside {keyword}")
        if keyword == "$ref":
            local = isinstance(value, str) and value.startswith(("#/$defs/", "#/definitions/"))
            if not local:
                raise ValueError(f"$ref must name a part of $defs, not {str(value)[:60]!r}")
        if keyword in ("enum", "const") and "type" in schema:
            raise ValueError(f"type is not supported beside {keyword}")

    def _check_object(self, schema: Mapping[str, Any], depth: int) -> None:
        properties = schema.get("properties", {})
        self._check_each(properties, "properties", depth)
        others = schema.get("additionalProperties")
        if others not in (None, True, False):
            self.check(others, depth + 1)
        unknown = [one for one in schema.get("required", ()) if one not in properties]
        if unknown:
            raise ValueError(f"required names {unknown[0]!r}, which is not in properties")
        for name in properties:
            if not name.isprintable() or '"' in name or "\\" in name:
                raise ValueError(f"the name of the property {name[:40]!r} needs escapes")

    def _check_each(self, schemas: Any, keyword: str, depth: int) -> None:
        if not isinstance(schemas, Mapping):
            raise ValueError(f"{keyword} must be an object")
        for one in schemas.values():
            self.check(one, depth + 1)

    def _refuse_others(self, keywords: Any, where: str) -> None:
        for one in sorted(keywords):
            raise ValueError(f"the keyword {one[:60]!r} is not supported {where}")
