"""Compiles the forms of grammars with xgrammar.

All functions raise ValueError with a message about the text; the library raises RuntimeError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail_structured_output_xgrammar.ebnf import check_grammar, quote
from dovetail_structured_output_xgrammar.regexes import translate
from dovetail_structured_output_xgrammar.schemas import translate_schema

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

    Form = Callable[[GrammarCompiler, str, Iterable[str]], CompiledGrammar]

MAX_CHARS = 65_536
"""Maximum number of characters of a grammar."""
MAX_WHITESPACE = 16
"""Maximum number of blanks and line breaks between two parts of a JSON text."""
MAX_STRUCTURES = 64


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A constrained part of a structural tag: `begin`, then a value of one form, then `end`."""

    begin: str
    schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    end: str = ""


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """Free text that contains structures, with the fields of `docs/structured_output.md`."""

    structures: list[Structure]
    triggers: list[str] = []
    at_least_one: bool = False
    stop_after_first: bool = False
    separator: str | None = None
    type: str = "structural_tag"


def json_schema(compiler: GrammarCompiler, text: str, _special: Iterable[str]) -> CompiledGrammar:
    """Compile the values that a JSON schema permits."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the JSON schema is not valid JSON: {error}") from None
    return compiler.compile_json_schema(
        json.dumps(translate_schema(schema), ensure_ascii=False),
        any_whitespace=True,
        max_whitespace_cnt=MAX_WHITESPACE,
        strict_mode=True,
    )


def json_object(compiler: GrammarCompiler, _text: str, special: Iterable[str]) -> CompiledGrammar:
    """Compile JSON objects."""
    return json_schema(compiler, '{"type": "object"}', special)


def regex(compiler: GrammarCompiler, text: str, _special: Iterable[str]) -> CompiledGrammar:
    """Compile a regular expression that matches the whole output."""
    return compiler.compile_regex(translate(text).text)


def choice(compiler: GrammarCompiler, text: str, _special: Iterable[str]) -> CompiledGrammar:
    """Compile a JSON list of strings."""
    try:
        texts = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise ValueError(f"choice must be a list of strings: {error}") from None
    if not texts or not all(texts):
        raise ValueError("choice must be a list of strings that are not empty")
    return compiler.compile_grammar(f"root ::= {' | '.join(map(quote, texts))}")


def grammar(compiler: GrammarCompiler, text: str, _special: Iterable[str]) -> CompiledGrammar:
    """Compile a grammar in GBNF or EBNF with `::=`."""
    return compiler.compile_grammar(check_grammar(text))


def structural_tag(compiler: GrammarCompiler, text: str, special: Iterable[str]) -> CompiledGrammar:
    """Compile free text that contains structures."""
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
    texts = [*tag.triggers, tag.separator or ""]
    texts += [item for structure in tag.structures for item in (structure.begin, structure.end)]
    for token in special:
        if any(token in item for item in texts):
            raise ValueError(
                f"the structural tag contains the special token {token[:40]!r}, which this plugin "
                "does not support"
            )
    tag_format = _triggered(tag) if tag.triggers else _listed(tag)
    written = json.dumps({"type": "structural_tag", "format": tag_format}, ensure_ascii=False)
    return compiler.compile_structural_tag(written)


FORMS: Mapping[str, Form] = {
    "json_schema": json_schema,
    "json_object": json_object,
    "regex": regex,
    "choice": choice,
    "grammar": grammar,
    "structural_tag": structural_tag,
}
"""For each form, the function that compiles it, with the compiler, the text and the strings of
special tokens as arguments."""


def _triggered(tag: StructuralTag) -> dict[str, Any]:
    used = set()
    for structure in tag.structures:
        fitting = [
            trigger for trigger in tag.triggers if trigger and structure.begin.startswith(trigger)
        ]
        if not fitting:
            raise ValueError(
                f"{structure.begin[:40]!r} does not begin with a trigger of the structural tag"
            )
        used.add(max(fitting, key=len))
    return {
        "type": "triggered_tags",
        "triggers": sorted(used),
        "tags": [_tag(item) for item in tag.structures],
        "at_least_one": tag.at_least_one,
        "stop_after_first": tag.stop_after_first,
    }


def _listed(tag: StructuralTag) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_tag(structure) for structure in tag.structures],
        "separator": tag.separator or "",
        "at_least_one": True,
        "stop_after_first": tag.stop_after_first or tag.separator is None,
    }


def _tag(structure: Structure) -> dict[str, Any]:
    content = _content(structure)
    return {"type": "tag", "begin": structure.begin, "content": content, "end": structure.end}


def _content(structure: Structure) -> dict[str, Any]:
    constraints = [
        item for item in (structure.schema, structure.regex, structure.grammar) if item is not None
    ]
    if len(constraints) != 1:
        raise ValueError("a structure needs exactly one of schema, regex and grammar")
    if structure.regex is not None:
        return {"type": "regex", "pattern": translate(structure.regex).written()}
    if structure.grammar is not None:
        return {"type": "grammar", "grammar": check_grammar(structure.grammar)}
    if not isinstance(structure.schema, dict):
        raise ValueError("the schema of a structure must be an object")
    return {
        "type": "json_schema",
        "json_schema": translate_schema(structure.schema),
        "max_whitespace_cnt": MAX_WHITESPACE,
    }
