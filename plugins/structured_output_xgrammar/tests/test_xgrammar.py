"""The grammar plugin `xgrammar`: forms, masks, the end of a text, rollback, refusals."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time

import jsonschema
import pytest

from dovetail.errors import RequestError
from dovetail.interfaces import GrammarContext, GrammarSpec
from dovetail_devkit import load_suite
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_structured_output_xgrammar.backend import XGrammar
from dovetail_structured_output_xgrammar.schemas import MAX_DEPTH, check_schema

TOKENIZER = ByteTokenizer()
END = TOKENIZER.EOS
WIDTH = TOKENIZER.vocab_size
INTEGER = {"type": "integer", "minimum": 0, "maximum": 150}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": INTEGER,
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "more": {"anyOf": [{"$ref": "#/$defs/flag"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
CALL = {"begin": "<call>add ", "schema": PERSON, "end": "</call>"}


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("xgrammar", reason="the optional library xgrammar is not installed")
    return XGrammar(GrammarContext(tokenizer=TOKENIZER, vocab_size=WIDTH))


def spec(form, text):
    written = text if isinstance(text, str) else json.dumps(text)
    return GrammarSpec(form=form, text=written, stop_token_ids=frozenset({END}))


def allowed(matcher):
    words = bytearray(4 * ((WIDTH + 31) // 32))
    matcher.fill_bitmask(memoryview(words))
    return [token for token in range(8 * len(words)) if words[token // 8] >> token % 8 & 1]


def write(matcher, seed, most=400):
    """Return a text of random allowed tokens, and whether it ended by itself."""
    draw = random.Random(seed)
    tokens = []
    while len(tokens) < most:
        token = draw.choice(allowed(matcher))
        assert matcher.accept([token]) == 1
        if token == END:
            return TOKENIZER.decode(tokens), True
        tokens.append(token)
    return TOKENIZER.decode(tokens), False


def test_the_plugin_meets_the_contract_of_grammars(backend):
    load_suite("grammar")(XGrammar)


def test_the_library_is_not_loaded_with_the_class_of_the_plugin():
    module = "dovetail_structured_output_xgrammar.backend"
    code = f"import sys, {module}; sys.exit('xgrammar' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_every_text_that_ends_is_valid_for_its_json_schema(backend):
    ended = 0
    for seed in range(20):
        text, has_ended = write(backend.compile(spec("json_schema", PERSON)), seed)
        ended += has_ended
        if has_ended:
            jsonschema.validate(json.loads(text), PERSON)
    assert ended >= 16


def test_texts_match_a_regex_a_choice_and_context_free_grammars(backend):
    cases = [
        ("regex", "[0-9]{2,3}-(x|yy)", lambda text: text.split("-")[1] in ("x", "yy")),
        ("choice", ["ja", "jawohl", "ä\n"], ["ja", "jawohl", "ä\n"].__contains__),
        ("grammar", 'root ::= "a" "b"*', lambda text: set(text[1:]) <= {"b"}),
        ("json_object", {}, lambda text: isinstance(json.loads(text), dict)),
    ]
    for form, text, holds in cases:
        results = [write(backend.compile(spec(form, text)), seed) for seed in range(10)]
        assert any(has_ended for _, has_ended in results)
        assert all(holds(written) for written, has_ended in results if has_ended), form


def test_structural_tags_constrain_calls(backend):
    matcher = backend.compile(
        spec("structural_tag", {"triggers": ["<call>"], "structures": [CALL]})
    )
    free = TOKENIZER.encode("I add. <call>", add_special_tokens=False)
    assert matcher.accept(free) == len(free)
    assert [chr(token) for token in allowed(matcher)] == ["a"]
    tag = {"structures": [CALL], "at_least_one": True, "separator": "\n"}
    for seed in range(5):
        text, has_ended = write(backend.compile(spec("structural_tag", tag)), seed, most=2000)
        for call in text.split("</call>\n") if has_ended else ():
            given = call.removeprefix("<call>add ").removesuffix("</call>")
            jsonschema.validate(json.loads(given), PERSON)


def test_the_end_of_a_text_is_counted_and_can_be_rolled_back(backend):
    matcher = backend.compile(spec("regex", "[a-z]{2}"))
    letters = TOKENIZER.encode("ab", add_special_tokens=False)
    before = allowed(matcher)
    assert matcher.accept([*letters, END, END]) == 4
    assert matcher.is_finished() and allowed(matcher) == [END]
    matcher.rollback(3)
    assert matcher.accept(letters[1:]) == 1
    matcher.rollback(2)
    assert allowed(matcher) == before
    assert matcher.accept([*letters, letters[0]]) == 2


HOSTILE = [
    ("json_schema", '{"type": "object"'),
    ("json_schema", "3"),
    ("json_schema", "[" * 100_000),
    ("json_schema", json.dumps({"enum": ["x" * (1 << 20)]})),
    ("json_schema", {"$ref": "http://127.0.0.1/x"}),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}),
    ("regex", "(a"),
    ("regex", "(?=a)b"),
    ("regex", "a" * (1 << 15)),
    ("choice", []),
    ("choice", ["a", ""]),
    ("choice", {}),
    ("grammar", "root ::= x"),
    ("grammar", 'start: "a"'),
    ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    ("structural_tag", {"structures": []}),
    ("structural_tag", {"structures": [CALL]}),
    ("structural_tag", {"structures": [{"begin": "<c>"}], "triggers": ["<c>"]}),
    ("structural_tag", {"structures": [CALL], "triggers": ["<call>"], "excludes": []}),
    ("unknown", "x"),
]


@pytest.mark.parametrize(("form", "text"), HOSTILE)
def test_an_invalid_grammar_is_refused_in_bounded_time(backend, form, text):
    begin_s = time.perf_counter()
    with pytest.raises(RequestError):
        backend.compile(spec(form, text))
    assert time.perf_counter() - begin_s < 5


def test_a_grammar_is_found_after_its_first_compilation(backend):
    one = spec("regex", "found[0-9]")
    assert backend.find(one) is None
    backend.compile(one)
    assert backend.find(one) is not None


DEEP = {"type": "array", "items": True}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"type": "number", "multipleOf": 2}, "multipleOf"),
        ({"minimum": 3}, "minimum"),
        ({"type": ["integer", "string"], "minimum": 3}, "minimum"),
        ({"not": {}}, "not"),
        ({"oneOf": [{}]}, "oneOf"),
        ({"allOf": [{}]}, "allOf"),
        ({"type": "object", "anyOf": [{}]}, "anyOf"),
        ({"anyOf": [{}], "required": ["a"]}, "required"),
        ({"$ref": "#/$defs/a", "maxLength": 3}, "maxLength"),
        ({"$ref": "#"}, r"\$ref"),
        ({"enum": [1], "type": "string"}, "type"),
        ({"type": "object", "required": ["a"]}, "required"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "if"),
        ({"type": "string", "maxLength": 3}, "maxLength"),
        ({"type": "any"}, "any"),
        (False, "object"),
        (DEEP, "nested"),
    ],
)
def test_a_keyword_that_the_library_would_ignore_is_refused_by_name(schema, named):
    with pytest.raises(ValueError, match=named):
        check_schema(schema)


def test_a_schema_within_the_supported_subset_is_accepted():
    check_schema(PERSON)
    check_schema({"title": "x", "type": ["string", "null"]})
    check_schema({})
