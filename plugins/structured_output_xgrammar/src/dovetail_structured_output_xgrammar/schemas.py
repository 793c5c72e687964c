"""Translates JSON schemas to the part of JSON Schema that xgrammar enforces.

The library ignores many keywords everywhere, and others next to `$ref`, `anyOf` or `enum`.
Therefore, each keyword is either translated, or the schema is rejected with an error that names the
keyword. The translation permits only valid values, but not always all of them: properties are
written in the order of the schema, and an object with `properties` has no others. All functions
raise ValueError with a message about the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from dovetail_structured_output_xgrammar import types
from dovetail_structured_output_xgrammar.exclusion import exclude_each_other
from dovetail_structured_output_xgrammar.recursion import check_recursion

MAX_DEPTH = 48
MAX_PARTS = 2000
MAX_OPTIONAL = 256
"""Maximum number of optional properties of an object."""
MAX_PATTERN_SIZE = 20_000
"""Maximum number of characters in all patterns if their repetitions are written out."""

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$comment", "$defs", "definitions"),
    }
)
"""Keywords that do not restrict values."""
_ALONE = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_KNOWN = frozenset({"type", *_ALONE}).union(*types.BY_TYPE.values())
_MAX_INTEGER = 2**63 - 1


def translate_schema(schema: object) -> dict[str, Any]:
    """Return the schema for the library."""
    return _Translation(schema).run()


class _Translation:
    """The translation of one schema. Every part that a `$ref` names becomes a definition."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._num_parts = self._num_labels = 0
        self._pattern_size = 0
        self._exclusive: list[list[dict[str, Any]]] = []

    def run(self) -> dict[str, Any]:
        start = self._reference("#")
        definitions: dict[str, Any] = {}
        while self._waiting:
            pointer = self._waiting.pop()
            definitions[self._names[pointer]] = self._part(self._find(pointer), 0)
        check_recursion(definitions)
        for options in self._exclusive:
            if not exclude_each_other(options, definitions):
                raise ValueError("oneOf is supported only if its schemas exclude each other")
        return {"$ref": start, "$defs": definitions}

    def _part(self, schema: object, depth: int) -> dict[str, Any]:
        """Return the translation of a part of the schema."""
        self._count(depth)
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise ValueError("each part of a JSON schema must be an object or true")
        keywords = schema.keys() - ANNOTATIONS
        if schema is self._root:
            keywords -= {"$id"}
        if keywords & {"anyOf", "oneOf"}:
            keywords -= {"discriminator"}
        for unknown in sorted(keywords - _KNOWN):
            raise ValueError(f"the keyword {unknown[:60]!r} is not supported")
        alone = next((item for item in _ALONE if item in keywords), None)
        others = keywords - {alone}
        if alone is None:
            return self._labeled(self._typed(schema, keywords, depth))
        if alone in ("enum", "const"):
            others -= {"type"}
        for other in sorted(others):
            raise ValueError(f"the keyword {other!r} is not supported with {alone}")
        return self._labeled(self._alone(alone, schema, depth))

    def _labeled(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return a part with a unique key, which the library ignores.

        Without the key, the library treats two parts as equal if they differ only in properties
        with names such as "title".
        """
        self._num_labels += 1
        return part | {"label": self._num_labels}

    def _alone(self, keyword: str, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        value = schema[keyword]
        if keyword == "$ref":
            return {"$ref": self._reference(value)}
        if keyword in ("enum", "const"):
            values = value if keyword == "enum" else [value]
            if not isinstance(values, list):
                raise ValueError("enum must be a list")
            kinds = self._kinds(schema, frozenset())
            fitting = [item for item in values if kinds is None or any(_is(item, k) for k in kinds)]
            if not fitting:
                raise ValueError(f"no value satisfies {keyword}")
            for item in fitting:
                self._check_value(item, depth)
            return {"enum": fitting}
        if not isinstance(value, list) or not value:
            raise ValueError(f"{keyword} must be a list of schemas")
        if keyword == "allOf" and len(value) > 1:
            raise ValueError("the keyword 'allOf' is supported only with one schema")
        options = [self._part(item, depth + 1) for item in value]
        if keyword == "oneOf":
            self._exclusive.append(options)
        return {"anyOf": options}

    def _typed(
        self, schema: Mapping[str, Any], keywords: frozenset[str] | set[str], depth: int
    ) -> dict[str, Any]:
        keywords = keywords - {"type"}
        kinds = self._kinds(schema, frozenset(keywords))
        if kinds is None:
            return {}
        for keyword in sorted(keywords.difference(*(types.BY_TYPE[kind] for kind in kinds))):
            raise ValueError(f"the keyword {keyword!r} is not supported for {' or '.join(kinds)}")
        options = []
        for kind in kinds:
            used = {item: schema[item] for item in keywords & types.BY_TYPE[kind]}
            options.append(self._of_type(kind, used, depth))
        if len(options) == 1:
            return options[0]
        return {"anyOf": [self._labeled(option) for option in options]}

    def _kinds(self, schema: Mapping[str, Any], keywords: frozenset[str]) -> list[str] | None:
        """Return the types of a part, or None for every type."""
        declared = schema.get("type")
        if declared is None and "type" not in schema:
            if not keywords:
                return None
            fitting = [kind for kind in reversed(types.BY_TYPE) if keywords <= types.BY_TYPE[kind]]
            if not fitting:
                raise ValueError(f"the keyword {min(keywords)!r} needs a type")
            return fitting[:1]
        kinds = declared if isinstance(declared, list) else [declared]
        invalid = [kind for kind in kinds if not isinstance(kind, str) or kind not in types.BY_TYPE]
        if invalid or not kinds:
            raise ValueError(f"the type {str(invalid or declared)[:40]!r} is not known")
        return list(dict.fromkeys(kinds))

    def _of_type(self, kind: str, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "number":
            return types.number(schema)
        if kind == "string":
            rule, size = types.string(schema)
        elif kind == "integer":
            rule, size = types.integer(schema)
        else:
            rule, size = {"type": kind}, 0
        self._add_size(size)
        return rule

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        patterns, others = schema.get("patternProperties"), schema.get("additionalProperties")
        counts = types.read_counts(schema, "minProperties", "maxProperties")
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list of names")
        for name in required:
            if not isinstance(name, str) or properties.get(name, False) is False:
                raise ValueError(f"required names {str(name)[:40]!r}, which is not in properties")
        if len(properties) - len(set(required)) > MAX_OPTIONAL:
            raise ValueError(f"properties has more than {MAX_OPTIONAL} optional names")
        if not properties:
            return self._mapping(patterns, others, counts, depth)
        if patterns is not None or counts:
            other = "patternProperties" if patterns is not None else next(iter(counts))
            raise ValueError(f"{other} is not supported with properties")
        if others not in (None, False):
            raise ValueError("additionalProperties must be false or absent with properties")
        parts = {
            name: self._part(item, depth + 1)
            for name, item in properties.items()
            if item is not False
        }
        return {
            "type": "object",
            "properties": parts,
            "required": list(dict.fromkeys(required)),
            "additionalProperties": False,
        }

    def _mapping(
        self, patterns: object, others: object, counts: dict[str, int], depth: int
    ) -> dict[str, Any]:
        """Return the schema of objects whose keys are not listed."""
        if counts.get("minProperties", 0) > 1:
            raise ValueError("minProperties must be 0 or 1, because keys can be written twice")
        mapping: dict[str, Any] = {"type": "object", **counts}
        if patterns is None:
            if others is False and counts.get("minProperties"):
                raise ValueError("no value satisfies minProperties and additionalProperties")
            rest = False if others is False else self._part(_or_true(others), depth + 1)
            return mapping | {"additionalProperties": rest}
        if not isinstance(patterns, dict) or len(patterns) != 1 or others not in (None, False):
            raise ValueError(
                "patternProperties is supported with one pattern and without additionalProperties"
            )
        ((text, value),) = patterns.items()
        pattern = types.read_pattern(text)
        if not pattern.text:
            raise ValueError("patternProperties must not contain an empty pattern")
        self._add_size(pattern.size)
        part = self._part(value, depth + 1)
        return mapping | {
            "patternProperties": {pattern.written(): part},
            "additionalProperties": False,
        }

    def _array(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        array: dict[str, Any] = {"type": "array"}
        array |= types.read_counts(schema, "minItems", "maxItems")
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(first, list):
            raise ValueError("prefixItems must be a list of schemas")
        if isinstance(items, list):
            raise ValueError("items must be one schema; use prefixItems for a list")
        if first:
            array["prefixItems"] = [self._part(item, depth + 1) for item in first]
        array["items"] = False if items is False else self._part(items, depth + 1)
        return array

    def _reference(self, pointer: object) -> str:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise ValueError(
                f"$ref must name a part of the same schema, not {str(pointer)[:60]!r}; other "
                "documents are not fetched"
            )
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
            self._waiting.append(pointer)
        return f"#/$defs/{self._names[pointer]}"

    def _find(self, pointer: str) -> object:
        node: Any = self._root
        for step in pointer.split("/")[1:]:
            key: Any = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                key = int(key) if key.isascii() and key.isdigit() and len(key) < 5 else -1
                node = dict(enumerate(node))
            if not isinstance(node, dict) or key not in node:
                raise ValueError(f"$ref {pointer[:60]!r} does not name a part of the schema")
            node = node[key]
        return node

    def _check_value(self, value: object, depth: int) -> None:
        """Check a value of enum or const."""
        self._count(depth)
        if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
            raise ValueError("an integer in enum or const has more than 63 bits")
        inner = value if isinstance(value, list) else ()
        if isinstance(value, dict):
            inner = value.values()
        for item in inner:
            self._check_value(item, depth + 1)

    def _count(self, depth: int) -> None:
        self._num_parts += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        if self._num_parts > MAX_PARTS:
            raise ValueError(f"the schema has more than {MAX_PARTS} parts")

    def _add_size(self, size: int) -> None:
        self._pattern_size += size
        if self._pattern_size > MAX_PATTERN_SIZE:
            raise ValueError(
                f"the patterns and lengths expand to more than {MAX_PATTERN_SIZE} characters"
            )


def _or_true(schema: object) -> object:
    return True if schema is None else schema


def _is(value: object, kind: str) -> bool:
    """Return whether a JSON value has a type."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, float) and kind == "integer":
        return value.is_integer()
    types_of: dict[str, type | tuple[type, ...]] = {
        **{"string": str, "array": list, "object": dict},
        **{"integer": int, "number": (int, float)},
    }
    return kind in types_of and isinstance(value, types_of[kind])
