"""Every text that the masks of the `xgrammar` plugin permit is valid."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from dovetail.interfaces import GrammarContext, GrammarSpec
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_structured_output_xgrammar.backend import XGrammar
from dovetail_structured_output_xgrammar.probe import MISSING

pytest.importorskip("xgrammar", reason=MISSING)

TOKENIZER = ByteTokenizer()
END = TOKENIZER.EOS
WIDTH = TOKENIZER.vocab_size
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])
NUM_TEXTS = 12


def closed(**properties):
    return {"type": "object", "properties": properties, "required": [*properties]}


TITLED = [closed(title={"type": "string", "maxLength": 3}), closed(title={"type": "integer"})]
TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": -3, "maximum": 3},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["value"],
}
SCHEMAS = {
    "person": {
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150.5},
            "tags": {"type": "array", "items": {"enum": ["a", 'ä"\\\n']}, "maxItems": 3},
            "more": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}], "default": None},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
        "$defs": {"a/b": {"type": ["boolean", "integer"], "minimum": 7}},
    },
    "properties with the names of annotations": closed(first=TITLED[0], second=TITLED[1]),
    "tree": TREE,
    "numbers": closed(
        a={"type": "number", "minimum": -1.5, "exclusiveMaximum": 1e-6},
        b={"type": "number", "exclusiveMinimum": 0.1, "maximum": 123456.789},
        c={"type": "integer", "multipleOf": 7},
        d={"type": "integer", "multipleOf": 30, "minimum": -100, "maximum": 100},
        e={"exclusiveMinimum": 0.5, "maximum": 2.5, "type": "integer"},
    ),
    "patterns": closed(
        a={"type": "string", "pattern": r"^(x[0-9]+)?$"},
        b={"type": "string", "pattern": "^a|0$"},
        c={"type": "string", "pattern": r"^[^a-z]\W\S{1,3}$"},
        d={"type": "string", "pattern": "0$"},
    ),
    "formats": closed(
        **{name: {"type": "string", "format": name} for name in ("date", "uuid", "ipv4", "email")}
    ),
    "keys": {"type": "object", "patternProperties": {"^[ab]{1,2}$": True}, "maxProperties": 2},
    "mapping": {"additionalProperties": {"type": "boolean"}, "minProperties": 1},
    "tuple": {"prefixItems": [{"const": 1}, {"type": "null"}], "items": False},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "discriminated": {
        "oneOf": [
            closed(kind={"const": "cat"}, lives={"type": "integer", "maximum": 9}),
            closed(kind={"enum": ["dog", "wolf"]}, name={"type": "string", "maxLength": 4}),
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "filtered enum": {"enum": [1, "a", None, 2.5, 3.0, {"title": 1}], "type": ["integer", "null"]},
    "anything": {},
}


@pytest.fixture(scope="module")
def backend():
    return XGrammar(GrammarContext(tokenizer=TOKENIZER, vocab_size=WIDTH))


def compiled(backend, form, text):
    written = text if isinstance(text, str) else json.dumps(text)
    return backend.compile(
        GrammarSpec(form=form, text=written, stop_token_ids=frozenset({END})),
    )


def generate(matcher, rng, soon=40, maximum=3000):
    """Return a text of random allowed tokens, or None if it exceeds `maximum` tokens.

    After `soon` tokens, tokens that close the text are preferred.
    """
    tokens = []
    while len(tokens) < maximum:
        words = bytearray(4 * ((WIDTH + 31) // 32))
        matcher.fill_bitmask(memoryview(words))
        actual = [token for token in range(WIDTH) if words[token // 8] >> token % 8 & 1]
        closing = [token for token in actual if token in (END, *b'"]}0e')]
        token = rng.choice(closing if closing and len(tokens) > soon else actual)
        assert matcher.accept([token]) == 1
        if token == END:
            return TOKENIZER.decode(tokens)
        tokens.append(token)
    return None


@pytest.mark.costly
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_output_that_ends_is_valid_for_its_schema(backend, schema):
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    rng = random.Random(7)
    texts = [generate(compiled(backend, "json_schema", schema), rng) for _ in range(NUM_TEXTS)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= NUM_TEXTS // 2
    for text in ended:
        validator.validate(json.loads(text))


def random_expression(rng, depth=0):
    """Return a random regular expression that JavaScript, Python and Rust read in the same way."""
    atoms = [*"abc01é,", ".", r"\d", r"\W", r"\S", r"\.", "[^a-c_]", "[a^]", r"[\^b-d]", "[é0-9-]"]
    counts = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?"]
    options = []
    for _ in range(rng.choice([1, 1, 2])):
        parts = []
        for _ in range(rng.randint(1, 3)):
            is_group = depth < 2 and rng.random() < 0.3
            atom = f"({random_expression(rng, depth + 1)})" if is_group else rng.choice(atoms)
            parts.append(atom + rng.choice(counts))
        options.append("".join(parts))
    return "|".join(options)


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(4))
def test_regular_expressions_match_the_strings_that_python_matches(backend, seed):
    rng = random.Random(seed)
    num_checked = 0
    for _ in range(60):
        pattern = random_expression(rng)
        try:
            plain = compiled(backend, "regex", pattern)
            quoted = compiled(
                backend, "json_schema", {"type": "string", "pattern": f"^({pattern})$"}
            )
        except ValueError:
            continue  # for example a repetition of an expression that may be empty
        for matcher, read in ((plain, str), (quoted, json.loads)):
            for _ in range(6):
                text = "".join(rng.choice("abc01é") for _ in range(rng.randint(0, 4)))
                tokens = [
                    *(text if read is str else json.dumps(text, ensure_ascii=False)).encode(),
                    END,
                ]
                count = matcher.accept(tokens)
                matcher.rollback(count)
                assert (count == len(tokens)) == bool(re.fullmatch(pattern, text)), pattern
                num_checked += 1
            text = generate(matcher, rng, soon=10, maximum=100)
            assert text is None or re.fullmatch(pattern, read(text)), (pattern, text)
    assert num_checked > 200
