"""Compiles the forms of grammars with xgrammar. All functions raise ValueError with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from xgrammar import CompiledGrammar, Grammar, GrammarCompiler

from dovetail_structured_output_xgrammar.schemas import check_schema

MAX_CHARS = 1 << 20
"""Maximum number of characters of a grammar."""
MAX_REGEX_CHARS = 1 << 14
_SCHEMA_OPTIONS = {"any_whitespace": True, "max_whitespace_cnt": 2, "strict_mode": False}


def json_schema(compiler: GrammarCompiler, text: str) -> CompiledGrammar:
    """Compile a JSON schema; refuse a schema that the library would not enforce."""
    schema = _read(text, "JSON schema")
    check_schema(schema)
    return compiler.compile_json_schema(json.dumps(schema), **_SCHEMA_OPTIONS)


def json_object(compiler: GrammarCompiler, _text: str) -> CompiledGrammar:
    """Compile the grammar of JSON objects."""
    return compiler.compile_json_schema('{"type": "object"}', **_SCHEMA_OPTIONS)


def regex(compiler: GrammarCompiler, text: str) -> CompiledGrammar:
    """Compile a regular expression that matches the whole output."""
    if len(text) > MAX_REGEX_CHARS:
        raise ValueError(f"the regular expression has more than {MAX_REGEX_CHARS} characters")
    return compiler.compile_regex(text)


def choice(compiler: GrammarCompiler, text: str) -> CompiledGrammar:
    """Compile a JSON list of texts."""
    texts = _read(text, "choice")
    if not isinstance(texts, list) or not texts:
        raise ValueError("choice must be a list of texts that are not empty")
    if not all(isinstance(one, str) and one for one in texts):
        raise ValueError("choice must be a list of texts that are not empty")
    return compiler.compile_grammar(f"root ::= {' | '.join(json.dumps(one) for one in texts)}")


def grammar(compiler: GrammarCompiler, text: str) -> CompiledGrammar:
    """Compile a text in GBNF or EBNF ("::=")."""
    if "::=" not in text:
        raise ValueError("xgrammar needs a grammar in GBNF or EBNF, with rules such as root ::= …")
    return compiler.compile_grammar(text)


def structural_tag(compiler: GrammarCompiler, text: str) -> CompiledGrammar:
    """Compile free text that contains structures."""
    tag = _read(text, "structural tag")
    structures = tag.get("structures") if isinstance(tag, dict) else None
    if not isinstance(structures, list) or not structures:
        raise ValueError("a structural tag must have structures")
    unknown = tag.keys() - {*_TAG_KEYS, "structures", "triggers", "separator", "type"}
    if unknown:
        raise ValueError(f"the key {min(unknown)[:40]!r} of a structural tag is not known")
    options = {key: bool(tag.get(key)) for key in _TAG_KEYS}
    tags = [_structure(one) for one in structures]
    if tag.get("triggers"):
        inner = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags, **options}
    elif options["at_least_one"]:
        separator = tag.get("separator")
        options["stop_after_first"] = options["stop_after_first"] or separator is None
        inner = {"type": "tags_with_separator", "tags": tags, **options}
        inner["separator"] = separator or ""
    else:
        raise ValueError("a structural tag needs triggers, or at_least_one")
    return compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": inner}))


FORMS: Mapping[str, Callable[[GrammarCompiler, str], CompiledGrammar]] = {
    "json_schema": json_schema,
    "json_object": json_object,
    "regex": regex,
    "choice": choice,
    "grammar": grammar,
    "structural_tag": structural_tag,
}
"""The function that compiles each form."""

_TAG_KEYS = ("at_least_one", "stop_after_first")


def _structure(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("begin"), str):
        raise ValueError("a structure needs begin, a value and end")
    values = given.keys() & {"schema", "regex", "grammar"}
    if len(values) != 1:
        raise ValueError("a structure needs exactly one of schema, regex and grammar")
    if "schema" in values:
        check_schema(given["schema"])
        # The library would permit any number of spaces in a schema of a structural tag.
        rules = Grammar.from_json_schema(
            json.dumps(given["schema"]), any_whitespace=False, strict_mode=False
        )
        content = {"type": "grammar", "grammar": str(rules)}
    elif "regex" in values:
        content = {"type": "regex", "pattern": given["regex"]}
    else:
        content = {"type": "grammar", "grammar": given["grammar"]}
    end = given.get("end", "")
    return {"type": "tag", "begin": given["begin"], "content": content, "end": end}


def _read(text: str, what: str) -> Any:
    if len(text) > MAX_CHARS:
        raise ValueError(f"the {what} has more than {MAX_CHARS} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the {what} is not valid JSON: {error}") from None
