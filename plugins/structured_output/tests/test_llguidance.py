"""The `llguidance` grammar plugin alone: forms, masks, the end of a text, rollback, rejections."""

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
from dovetail_structured_output.backend import LLGuidance
from dovetail_structured_output.forms import FORMS

TOKENIZER = ByteTokenizer()
END = TOKENIZER.eos_token_id
WIDTH = TOKENIZER.vocab_size
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = {
    "begin": '<call>{"name": "add", "arguments": ',
    "schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "end": "}</call>",
}


@pytest.fixture(scope="module")
def backend():
    return LLGuidance(GrammarContext(tokenizer=TOKENIZER, vocab_size=WIDTH))


def spec(form, text):
    written = text if isinstance(text, str) else json.dumps(text)
    return GrammarSpec(form=form, text=written, stop_token_ids=frozenset({END}))


def allowed(matcher):
    words = bytearray(4 * ((WIDTH + 31) // 32))
    matcher.fill_bitmask(memoryview(words))
    return [token for token in range(WIDTH) if words[token // 8] >> token % 8 & 1]


def write(matcher, seed, maximum=400):
    """Return a text of random allowed tokens, and whether a stop token ended it."""
    rng = random.Random(seed)
    tokens = []
    while len(tokens) < maximum:
        token = rng.choice(allowed(matcher))
        assert matcher.accept([token]) == 1
        if token == END:
            return TOKENIZER.decode(tokens), True
        tokens.append(token)
    return TOKENIZER.decode(tokens), False


def test_the_plugin_meets_the_grammar_contract():
    load_suite("grammar")(LLGuidance)


def test_importing_the_plugin_does_not_load_the_library():
    code = "import sys, dovetail_structured_output.backend; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    assert set(FORMS) == LLGuidance.forms


def test_every_output_that_ends_is_valid_for_its_json_schema(backend):
    ended = 0
    for seed in range(30):
        text, has_ended = write(backend.compile(spec("json_schema", PERSON)), seed)
        ended += has_ended
        if has_ended:
            jsonschema.validate(json.loads(text), PERSON)
    assert ended >= 24


def test_outputs_match_a_regex_or_a_choice_or_a_context_free_grammar(backend):
    cases = [
        ("regex", "[0-9]{2,3}-(x|yy)", lambda text: text.split("-")[1] in ("x", "yy")),
        ("choice", ["ja", "jawohl", "ä\n"], ["ja", "jawohl", "ä\n"].__contains__),
        ("grammar", 'start: "(" start ")" | "x"', lambda text: text.count("(") == text.count(")")),
        ("grammar", 'root ::= "a" "b"*', lambda text: set(text[1:]) <= {"b"}),
        ("json_object", {}, lambda text: isinstance(json.loads(text), dict)),
    ]
    for form, text, holds in cases:
        results = [write(backend.compile(spec(form, text)), seed) for seed in range(10)]
        assert any(has_ended for _, has_ended in results)
        assert all(holds(written) for written, has_ended in results if has_ended), form


def test_a_structural_tag_constrains_the_text_after_its_trigger(backend):
    tag = {"triggers": ["<call>"], "structures": [CALL]}
    matcher = backend.compile(spec("structural_tag", tag))
    free = TOKENIZER.encode("I add. <call>", add_special_tokens=False)
    assert matcher.accept(free) == len(free)
    assert [chr(token) for token in allowed(matcher)] == ["{"]
    rest = TOKENIZER.encode(
        '{"name": "add", "arguments": {"a":7}}</call> Done', add_special_tokens=False
    )
    assert matcher.accept(rest) == len(rest)
    assert END in allowed(matcher)


def test_at_least_one_and_stop_after_first_permit_exactly_one_structure(backend):
    tag = {"structures": [CALL], "at_least_one": True, "stop_after_first": True}
    for seed in range(5):
        text, has_ended = write(backend.compile(spec("structural_tag", tag)), seed)
        assert has_ended
        call = json.loads(text.removeprefix("<call>").removesuffix("</call>"))
        assert call["name"] == "add"
        assert 0 <= call["arguments"]["a"] <= 99


def test_a_stop_token_counts_as_accepted_and_can_be_rolled_back(backend):
    matcher = backend.compile(spec("regex", "[a-z]{2}"))
    letters = TOKENIZER.encode("ab", add_special_tokens=False)
    before = allowed(matcher)
    assert matcher.accept([*letters, END, END]) == 4
    assert matcher.is_finished()
    assert allowed(matcher) == [END]
    matcher.rollback(3)
    assert matcher.accept(letters[1:]) == 1
    matcher.rollback(2)
    assert allowed(matcher) == before
    assert matcher.accept([*letters, letters[0]]) == 2


class AddsSpace(ByteTokenizer):
    """Adds a space at the start of each text, like SentencePiece."""

    def encode(self, text, *, add_special_tokens=True):
        return super().encode(f" {text}", add_special_tokens=add_special_tokens)


def test_a_tokenizer_that_adds_a_space_permits_the_same_strings():
    backend = LLGuidance(GrammarContext(tokenizer=AddsSpace(), vocab_size=WIDTH))
    for seed in range(10):
        text, has_ended = write(backend.compile(spec("json_schema", PERSON)), seed)
        if has_ended:
            jsonschema.validate(json.loads(text), PERSON)
    assert has_ended


def test_masks_of_a_batch_equal_masks_of_single_requests(backend):
    matchers = [
        backend.compile(spec("regex", "[a-f]+")),
        backend.compile(spec("choice", ["yes", "no"])),
        backend.compile(spec("json_schema", PERSON)),
    ]
    matchers[1].accept(TOKENIZER.encode("no", add_special_tokens=False))
    size = 4 * ((WIDTH + 31) // 32)
    words = bytearray(size * 3)
    backend.fill_bitmasks(matchers, memoryview(words))
    for index, matcher in enumerate(matchers):
        row = words[index * size : (index + 1) * size]
        actual = [token for token in range(WIDTH) if row[token // 8] >> token % 8 & 1]
        assert actual == allowed(matcher)


def test_a_compiled_grammar_is_reused_and_starts_at_the_beginning(backend):
    arguments = spec("regex", "found[0-9]")
    assert backend.find(arguments) is None
    first = backend.compile(arguments)
    first.accept(TOKENIZER.encode("found", add_special_tokens=False))
    again = backend.find(arguments)
    assert [chr(token) for token in allowed(again)] == ["f"]


REFUSED = {
    "unknown keyword": ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    "unknown keyword, asked to be ignored": (
        "json_schema",
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
        "uniqueItems",
    ),
    "unknown keyword in a structure": (
        "structural_tag",
        {
            "structures": [
                {
                    "begin": "<",
                    "schema": {"uniqueItems": True, "x-guidance": {"lenient": True}},
                }
            ],
            "at_least_one": True,
        },
        "uniqueItems",
    ),
    "remote reference": ("json_schema", {"$ref": "http://example.com/x"}, "example.com"),
    "contradiction": ("json_schema", {"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    "no value": ("json_schema", "false", "not"),
    "no JSON": ("json_schema", '{"a"', "not valid JSON"),
    "deep JSON": ("json_schema", '{"a":' * 20000, "recursion"),
    "bad regex": ("regex", "(a", "invalid regex .* regex parse error: unclosed group\\.$"),
    "bad pattern": (
        "json_schema",
        {"type": "string", "pattern": "[z-a]"},
        "regex parse error: invalid character class range",
    ),
    "bad grammar": ("grammar", "start", "Expected"),
    "empty choice": ("choice", [], "not empty"),
    "numbers as choice": ("choice", [1], "list of strings"),
    "tag without trigger": ("structural_tag", {"structures": [CALL]}, "triggers"),
    "tag with another trigger": (
        "structural_tag",
        {"structures": [CALL], "triggers": ["<tool>"]},
        "not begin with a trigger",
    ),
    "tag with unknown field": ("structural_tag", {"structures": [], "x": 1}, "not valid"),
    "unknown form": ("yaml", "a: 1", "not one of"),
}


@pytest.mark.parametrize(("form", "text", "reason"), REFUSED.values(), ids=REFUSED)
def test_the_error_for_an_unsupported_grammar_names_the_cause(backend, form, text, reason):
    with pytest.raises(RequestError, match=reason) as rejection:
        backend.compile(spec(form, text))
    assert rejection.value.parameter.startswith("structured_outputs")


BOMBS = {
    "repetitions": ("regex", "((a{100}){100}){100}"),
    "alternations": ("regex", "|".join(f"{n}x{n * 7}" for n in range(20000))),
    "recursion": ("grammar", "start: a\n" + "\n".join(f"{c}: {c} {c} | {c}" for c in "abcdefgh")),
    "wide schema": (
        "json_schema",
        {"anyOf": [{"type": "object", "required": [f"k{n}"]} for n in range(2000)]},
    ),
    "nested arrays": ("json_schema", '{"items":' * 100 + "{}" + "}" * 100),
    "huge counts": ("json_schema", {"type": "array", "minItems": 10**6, "maxItems": 10**9}),
    "long texts": ("json_schema", {"type": "string", "minLength": 10**6}),
}


@pytest.mark.costly
@pytest.mark.parametrize(("form", "text"), BOMBS.values(), ids=BOMBS)
def test_a_grammar_bomb_compiles_or_is_rejected_in_bounded_time(backend, form, text):
    began = time.perf_counter()
    try:
        allowed(backend.compile(spec(form, text)))
    except RequestError as rejection:
        assert len(str(rejection)) < 1000
    assert time.perf_counter() - began < 30
