"""The `xgrammar` plugin rejects schemas that the library would not enforce in bounded time."""

from __future__ import annotations

import json
import time

import pytest

from dovetail.errors import RequestError
from dovetail.interfaces import GrammarContext, GrammarSpec
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_structured_output_xgrammar.backend import XGrammar
from dovetail_structured_output_xgrammar.probe import MISSING
from dovetail_structured_output_xgrammar.regexes import translate
from dovetail_structured_output_xgrammar.schemas import translate_schema

TOKENIZER = ByteTokenizer()
WIDTH = TOKENIZER.vocab_size


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("xgrammar", reason=MISSING)
    return XGrammar(GrammarContext(tokenizer=TOKENIZER, vocab_size=WIDTH))


def spec(form, text):
    written = text if isinstance(text, str) else json.dumps(text)
    return GrammarSpec(form=form, text=written, stop_token_ids=frozenset({TOKENIZER.EOS}))


def nested(depth):
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


OPEN = {"type": "object", "properties": {"a": {}}}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
ENDLESS = {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}
SCHEMAS = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "array", "items": [{}]}, "items"),
    ({"type": "array", "minItems": True}, "minItems"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ({"type": "array", "maxItems": 10**6}, "maxItems"),
    ({**OPEN, "additionalProperties": True}, "additionalProperties"),
    ({**OPEN, "patternProperties": {"b": {}}}, "patternProperties"),
    ({**OPEN, "minProperties": 1}, "minProperties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties"),
    ({"type": "object", "required": ["a"]}, "required"),
    ({"type": "number", "multipleOf": 2}, "multipleOf"),
    ({"type": "integer", "multipleOf": 2, "minimum": 3}, "multipleOf"),
    ({"type": "integer", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6}, "minimum"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, "minimum"),
    ({"type": "number", "minimum": 1e300}, "minimum"),
    ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"type": "string", "minLength": 2, "pattern": "a"}, "pattern"),
    ({"type": "string", "format": "date", "pattern": "a"}, "format"),
    ({"type": "string", "format": "hostname"}, "hostname"),
    ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
    ({"type": "string", "pattern": "a$b"}, "at the start or end"),
    ({"type": "string", "pattern": 'a"b'}, "no character"),
    ({"type": "string", "minimum": 3}, "minimum"),
    ({"minimum": 3, "maxLength": 2}, "maxLength"),
    ({"type": ["integer", "null"], "maxLength": 2}, "maxLength"),
    ({"type": "any"}, "any"),
    ({"not": {}}, "not"),
    ({"if": {}, "then": {}}, "if"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
    ({"anyOf": [{}], "required": ["a"]}, "required"),
    ({"anyOf": []}, "anyOf"),
    ({"enum": []}, "enum"),
    ({"enum": ["a"], "type": "integer"}, "enum"),
    ({"const": 2**63}, "63 bits"),
    ({"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": {}}}, "maxLength"),
    ({"$ref": "http://example.com/x"}, "example.com"),
    ({"$ref": "#/$defs/missing"}, "missing"),
    ({"$ref": "#name"}, "#name"),
    ({"$anchor": "name"}, "anchor"),
    ({"properties": {"a": {"$id": "http://example.com"}}}, "id"),
    ({"properties": {"a": {"if": {}}}}, "if"),
    ({"nullable": True, "type": "string"}, "nullable"),
    (LOOP, "refers to itself directly"),
    (ENDLESS, "infinitely nested"),
    (False, "must be an object"),
    ([], "must be an object"),
    (json.loads(nested(60)), "levels deep"),
]


@pytest.mark.parametrize(("schema", "named"), SCHEMAS, ids=[str(item)[:60] for item, _ in SCHEMAS])
def test_the_error_for_a_schema_that_the_library_would_not_enforce_names_the_keyword(schema, named):
    with pytest.raises(ValueError, match=named):
        translate_schema(schema)


EXPRESSIONS = [
    *("(a", "a)", "[a", "*a", "a**", "a{2", "a{3,2}", "(?=a)b", "(?!a)b", "(?<=a)b", "(?i)a"),
    *(r"a\b", r"\Aa", r"(a)\1", r"\p{L}", r"\ud800", r"\x4", "[z-a]", "[[:alpha:]]", "[a&&b]"),
    *("a^b", "(^a)", "(a|b?){1,3}", "(a{1000}){1000}", "[^\\u0000-\\u{10FFFF}]", "[]a]", "a\\"),
]


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_a_regular_expression_with_a_different_meaning_in_the_library_is_rejected(pattern):
    with pytest.raises(ValueError, match="regular expression"):
        translate(pattern)


CALL = {"begin": "<call>", "regex": "a", "end": ""}
TEXTS = {
    "no JSON": ("json_schema", '{"a"', "not valid JSON"),
    "deep JSON": ("json_schema", '{"a":' * 10_000, "recursion"),
    "half a character": ("json_schema", '{"const": "\\ud800"}', "not valid JSON"),
    "large schema": ("json_schema", {"const": "x" * 10**7}, "65536 characters"),
    "bad regex": ("regex", "(a", "not closed"),
    "Lark": ("grammar", 'start: "a"', "Lark"),
    "function": ("grammar", "root ::= Token(3)", "function Token"),
    "properties of a rule": ("grammar", 'root ::= a\na[lazy] ::= "b"', "must follow a name"),
    "lookahead": ("grammar", 'root ::= "a" (="b")', "not GBNF"),
    "missing rule": ("grammar", "root ::= a", "not defined"),
    "no root": ("grammar", 'a ::= "b"', "root"),
    "endless rules": ("grammar", "root ::= a\na ::= root", "it matches no string"),
    "deep grammar": ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    "empty choice": ("choice", [], "not empty"),
    "numbers as choice": ("choice", [1], "list of strings"),
    "tag without trigger": ("structural_tag", {"structures": [CALL]}, "triggers"),
    "another trigger": (
        "structural_tag",
        {"structures": [CALL], "triggers": ["<tool>"]},
        "not begin with a trigger",
    ),
    "two triggers": (
        "structural_tag",
        {"structures": [CALL, CALL | {"begin": "<c"}], "triggers": ["<call>", "<c"]},
        "multiple triggers",
    ),
    "special token": (
        "structural_tag",
        {"structures": [CALL | {"end": "<eos>"}], "triggers": ["<call>"]},
        "special token '<eos>'",
    ),
    "unknown field": ("structural_tag", {"structures": [], "x": 1}, "not valid"),
    "keyword in a structure": (
        "structural_tag",
        {"structures": [{"begin": "<", "schema": {"uniqueItems": True}}], "at_least_one": True},
        "uniqueItems",
    ),
    "separator with triggers": (
        "structural_tag",
        {"structures": [CALL], "triggers": ["<call>"], "separator": ","},
        "separator",
    ),
    "unknown form": ("yaml", "a: 1", "not one of"),
}


@pytest.mark.parametrize(("form", "text", "reason"), TEXTS.values(), ids=TEXTS)
def test_the_error_for_an_unsupported_grammar_names_the_cause(backend, form, text, reason):
    with pytest.raises(RequestError, match=reason) as rejection:
        backend.compile(spec(form, text))
    assert rejection.value.parameter.startswith("structured_outputs")
    assert len(str(rejection.value)) < 1000


def rules(body, count):
    lines = [f"r{n} ::= " + body.replace("NEXT", f"r{n + 1}") for n in range(count)]
    return "\n".join(["root ::= r0", *lines, f'r{count} ::= "x" | ""'])


BOMBS = {
    "repetitions": ("regex", "((a{25}){25}){25}"),
    "ambiguous repetitions": ("regex", "((a{1,27}){1,27}){1,27}"),
    "optional characters": ("regex", "a?" * 30_000),
    "alternatives": ("regex", "|".join(f"{n}x{n * 7}" for n in range(5000))),
    "doubled rules": ("grammar", rules("NEXT NEXT", 40)),
    "repeated rules": ("grammar", rules('(NEXT | "x"){0,90}', 44)),
    "chain of rules": ("grammar", rules('(NEXT? | "x")*', 490)),
    "recursion": ("grammar", 'root ::= root root | "a" | ""'),
    "wide schema": ("json_schema", {"anyOf": [{"required": [f"k{n}"]} for n in range(2000)]}),
    "nested arrays": ("json_schema", nested(47)),
    "huge counts": ("json_schema", {"type": "array", "minItems": 10**6, "maxItems": 10**9}),
    "large counts": (
        "json_schema",
        {"items": {"type": "array", "minItems": 9999}, "minItems": 9999},
    ),
    "long texts": ("json_schema", {"type": "string", "minLength": 10**4}),
    "properties": ("json_schema", {"properties": {f"p{n}": {"const": n} for n in range(2000)}}),
    "multiples": ("json_schema", {"items": {"type": "integer", "multipleOf": 500}}),
    "references": (
        "json_schema",
        {
            "$ref": "#/$defs/0",
            "$defs": {
                f"{n}": {"prefixItems": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(150)
            }
            | {"150": {}},
        },
    ),
}


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("form", "text"), BOMBS.values(), ids=BOMBS)
def test_a_grammar_bomb_is_rejected_or_ends_its_request_in_bounded_time(backend, form, text):
    begin_s = time.thread_time()
    try:
        matcher = backend.compile(spec(form, text))
        for _ in range(200):
            words = bytearray(4 * ((WIDTH + 31) // 32))
            matcher.fill_bitmask(memoryview(words))
            actual = [token for token in range(256) if words[token // 8] >> token % 8 & 1]
            if not actual or not matcher.accept(actual[-1:]):
                break
    except ValueError as rejection:
        assert len(str(rejection)) < 1000
    assert time.thread_time() - begin_s < 30
