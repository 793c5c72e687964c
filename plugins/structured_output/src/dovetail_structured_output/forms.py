"""Translates the forms of grammars to the grammars of llguidance.

All functions raise ValueError with a message that describes the invalid text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

WHITESPACE = r"(?: |\n[ \t]{0,32})?"
"""Whitespace between the parts of a JSON text: none, a space, or a line break with indentation."""

MAX_STRUCTURES = 256
ANY_TEXT = r"/(.|\n)*/"


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A constrained part of a structural tag: `begin`, then a value of one form, then `end`."""

    begin: str
    schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    end: str = ""


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """Free text that contains structures.

    triggers: strings after which the output must continue as a structure that begins with them.
    at_least_one: the output begins with a structure. stop_after_first: the output ends after the
    first structure. separator: with `at_least_one`, the output consists of structures with this
    text between them.
    """

    structures: list[Structure]
    triggers: list[str] = []
    at_least_one: bool = False
    stop_after_first: bool = False
    separator: str | None = None
    type: str = "structural_tag"


def json_schema(text: str, _special: Mapping[str, int]) -> str:
    """Return the grammar of the values that a JSON schema permits."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the JSON schema is not valid JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError("a JSON schema must be an object or a boolean")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return str(LLMatcher.grammar_from_json_schema(_plain(schema), overrides=_JSON_OPTIONS))


def json_object(_text: str, special: Mapping[str, int]) -> str:
    """Return the grammar of JSON objects."""
    return json_schema('{"type": "object"}', special)


def regex(text: str, _special: Mapping[str, int]) -> str:
    """Return the grammar of a regular expression that matches the whole output."""
    return str(LLMatcher.grammar_from_regex(text))


def choice(text: str, _special: Mapping[str, int]) -> str:
    """Return the grammar of a JSON list of strings."""
    try:
        texts = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise ValueError(f"choice must be a list of strings: {error}") from None
    if not texts or not all(texts):
        raise ValueError("choice must be a list of strings that are not empty")
    return str(LLMatcher.grammar_from_lark(f"start: {' | '.join(map(_quoted, texts))}"))


def grammar(text: str, _special: Mapping[str, int]) -> str:
    """Return the grammar of a text in Lark syntax, or in GBNF or EBNF ("::=")."""
    return str(LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text))


def structural_tag(text: str, special: Mapping[str, int]) -> str:
    """Return the grammar of free text that contains structures."""
    try:
        tag = msgspec.json.decode(text, type=StructuralTag)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the structural tag is not valid: {error}") from None
    if not 1 <= len(tag.structures) <= MAX_STRUCTURES:
        raise ValueError(f"a structural tag must have 1 to {MAX_STRUCTURES} structures")
    if not (tag.at_least_one or tag.triggers):
        raise ValueError("a structural tag needs triggers, or at_least_one")
    if tag.separator is not None and (tag.triggers or not tag.at_least_one):
        raise ValueError("the separator of a structural tag needs at_least_one and no triggers")
    return str(LLMatcher.grammar_from_lark("\n".join(_tag_rules(tag, special))))


FORMS: Mapping[str, Callable[[str, Mapping[str, int]], str]] = {
    "json_schema": json_schema,
    "json_object": json_object,
    "regex": regex,
    "choice": choice,
    "grammar": grammar,
    "structural_tag": structural_tag,
}
"""For each form, the function that builds the grammar from the form's text and the special tokens.
"""

# They replace the options in a schema ("x-guidance"), so that a client cannot disable keywords.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "lenient": False,
}


def _tag_rules(tag: StructuralTag, special: Mapping[str, int]) -> list[str]:
    names = [f"structure_{number}" for number in range(len(tag.structures))]
    rules = [f"any_text: ANY_TEXT\nANY_TEXT: {ANY_TEXT}"]
    for name, structure in zip(names, tag.structures, strict=True):
        parts = [_literal(structure.begin, special), _value(structure)]
        rules.append(f"{name}: {' '.join([*parts, _literal(structure.end, special)])}")
        if tag.triggers:
            rules += _triggered(f"found_{name}", structure, tag.triggers, special)
    alternatives = " | ".join(f"found_{name}" for name in names)
    first = " | ".join(names)
    if tag.at_least_one:
        more = f" ({alternatives})* any_text" if tag.triggers else ""
        if tag.separator is not None:
            more = f" ({_literal(tag.separator, special)} ({first}))*"
        start = f"({first})" + ("" if tag.stop_after_first else more)
    elif tag.stop_after_first:
        start = f"({alternatives}) | any_text"
    else:
        start = f"({alternatives})* any_text"
    return ["%llguidance {}", f"start: {start}", *rules]


def _triggered(
    name: str, structure: Structure, triggers: list[str], special: Mapping[str, int]
) -> list[str]:
    """Return the rules of free text up to a trigger, and the rest of the structure after it."""
    trigger = max(
        (item for item in triggers if item and structure.begin.startswith(item)),
        key=len,
        default="",
    )
    if not trigger:
        raise ValueError(
            f"{structure.begin[:40]!r} does not begin with a trigger of the structural tag"
        )
    value = _value(structure)
    rest = f"{_literal(structure.begin[len(trigger) :], special)} {value}"
    rest += f" {_literal(structure.end, special)}"
    if trigger in special:
        return [f"{name}: any_text {_literal(trigger, special)} {rest}"]
    return [
        f"{name}: {name}_trigger {rest}",
        f"{name}_trigger[lazy]: ANY_TEXT {_quoted(trigger)}",
    ]


def _value(structure: Structure) -> str:
    constraints = [
        item for item in (structure.schema, structure.regex, structure.grammar) if item is not None
    ]
    if len(constraints) != 1:
        raise ValueError("a structure needs exactly one of schema, regex and grammar")
    if structure.schema is not None:
        if not isinstance(structure.schema, dict):
            raise ValueError("the schema of a structure must be an object")
        options = {"x-guidance": {**_JSON_OPTIONS, "whitespace_pattern": " ?"}}
        return f"%json {_plain({**structure.schema, **options})}"
    if structure.regex is not None:
        return "/" + structure.regex.replace("/", "\\/") + "/"
    inner = structure.grammar or ""
    return "%lark {\n" + (any_to_lark(inner) if "::=" in inner else inner) + "\n}"


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Return Lark syntax for a text whose special tokens are single tokens."""
    parts: list[str] = []
    while text:
        candidates = [(text.find(item), -len(item), item) for item in special if item in text]
        if not candidates:
            parts.append(_quoted(text))
            break
        index, _, match = min(candidates)
        if index:
            parts.append(_quoted(text[:index]))
        parts.append(f"<[{special[match]}]>")
        text = text[index + len(match) :]
    return " ".join(parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _plain(value: Any) -> str:
    return msgspec.json.encode(value).decode()
