"""The `xgrammar` grammar plugin: forms, masks, the end of a text, rollback."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import jsonschema
import pytest

from dovetail.errors import RequestError
from dovetail.interfaces import GrammarContext, GrammarSpec
from dovetail_devkit import load_suite
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_structured_output_xgrammar.backend import XGrammar
from dovetail_structured_output_xgrammar.probe import MISSING, probe

needs_library = pytest.mark.skipif(not probe().usable, reason=MISSING)
TOKENIZER = ByteTokenizer()
END = TOKENIZER.EOS
WIDTH = TOKENIZER.vocab_size
CALL = {
    "begin": '<call>{"name": "add", "arguments": ',
    "schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
    },
    "end": "}</call>",
}
ADDED = '<call>{"name": "add", "arguments": {"a": 7}}</call>'


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("xgrammar", reason=MISSING)
    return XGrammar(GrammarContext(tokenizer=TOKENIZER, vocab_size=WIDTH))


def spec(form, text, ends=(END,)):
    written = text if isinstance(text, str) else json.dumps(text)
    return GrammarSpec(form=form, text=written, stop_token_ids=frozenset(ends))


def allowed(matcher):
    words = bytearray(4 * ((WIDTH + 31) // 32))
    matcher.fill_bitmask(memoryview(words))
    return [token for token in range(8 * len(words)) if words[token // 8] >> token % 8 & 1]


def accepts(matcher, text):
    """Return whether a text is complete. The matcher does not change."""
    tokens = [*text.encode(), END]
    count = matcher.accept(tokens)
    matcher.rollback(count)
    return count == len(tokens)


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


@needs_library
def test_the_plugin_meets_the_grammar_contract():
    load_suite("grammar")(XGrammar)


def test_importing_the_plugin_does_not_load_the_library():
    module = "dovetail_structured_output_xgrammar.backend"
    code = f"import sys, {module}; sys.exit('xgrammar' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_without_the_library_a_request_is_rejected_with_advice(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("dovetail_structured_output_xgrammar.probe.find_spec", lambda name: None)
    backend = XGrammar(GrammarContext(tokenizer=TOKENIZER, vocab_size=WIDTH))
    with pytest.raises(RequestError, match="not installed"):
        backend.compile(spec("regex", "a"))
    assert not probe().usable


def test_outputs_match_a_regex_or_a_choice_or_a_context_free_grammar(backend):
    cases = [
        ("regex", "[0-9]{2,3}-(x|yy)", lambda text: text.split("-")[1] in ("x", "yy")),
        ("choice", ["ja", "jawohl", 'ä"\\\n', "😀"], ["ja", "jawohl", 'ä"\\\n', "😀"].__contains__),
        ("grammar", 'root ::= "a" "b"*', lambda text: set(text[1:]) <= {"b"}),
        ("json_object", {}, lambda text: isinstance(json.loads(text), dict)),
    ]
    for form, text, holds in cases:
        results = [write(backend.compile(spec(form, text)), seed) for seed in range(10)]
        assert any(has_ended for _, has_ended in results)
        assert all(holds(written) for written, has_ended in results if has_ended), form


def test_a_structural_tag_constrains_the_text_after_its_trigger(backend):
    tag = {"triggers": ["<call>", "unused"], "structures": [CALL]}
    matcher = backend.compile(spec("structural_tag", tag))
    assert matcher.accept(b"I add. <call>") == 13
    assert [chr(token) for token in allowed(matcher)] == ["{"]
    matcher.rollback(13)
    assert accepts(matcher, f"unused {ADDED} Done {ADDED}")
    once = backend.compile(spec("structural_tag", tag | {"stop_after_first": True}))
    assert accepts(once, f"I add. {ADDED}") and accepts(once, "no call")
    assert not accepts(once, f"{ADDED} Done")


def test_at_least_one_requires_a_structure_at_the_start(backend):
    tag = {"structures": [CALL], "at_least_one": True}
    for more in ({}, {"stop_after_first": True}, {"separator": ", "}):
        matcher = backend.compile(spec("structural_tag", tag | more))
        assert not accepts(matcher, "") and accepts(matcher, ADDED)
        assert accepts(matcher, f"{ADDED}, {ADDED}") == ("separator" in more)
    for seed in range(5):
        text, has_ended = write(backend.compile(spec("structural_tag", tag)), seed)
        assert has_ended
        call = json.loads(text.removeprefix("<call>").removesuffix("</call>"))
        jsonschema.validate(call["arguments"], CALL["schema"])


def test_structures_of_each_form_are_constrained(backend):
    for value, valid, invalid in (
        ({"regex": "(ab*)?"}, "abb", "b"),
        ({"grammar": 'root ::= "x" | "y" root'}, "yyx", "y"),
        ({"schema": {"type": "string", "pattern": "^(ab*)?$"}}, '"ab"', '"b"'),
    ):
        tag = {"structures": [{"begin": "<", "end": ">", **value}], "at_least_one": True}
        matcher = backend.compile(spec("structural_tag", tag))
        assert accepts(matcher, f"<{valid}>") and not accepts(matcher, f"<{invalid}>")


def test_a_stop_token_counts_as_accepted_and_can_be_rolled_back(backend):
    matcher = backend.compile(spec("regex", "[a-z]{2}"))
    before = allowed(matcher)
    assert not matcher.is_finished()
    assert matcher.accept([*b"ab", END, END]) == 4
    assert matcher.is_finished()
    assert allowed(matcher) == [END]
    matcher.rollback(2)
    assert matcher.is_finished() and allowed(matcher) == [END]
    matcher.rollback(1)
    assert not matcher.is_finished()
    assert matcher.accept(b"b") == 1
    matcher.rollback(2)
    assert allowed(matcher) == before
    assert matcher.accept(b"aba") == 2


def test_the_stop_tokens_of_the_request_end_the_text_even_if_they_are_letters(backend):
    matcher = backend.compile(spec("regex", "[a-c]+", ends=(ord("c"), 10**6)))
    assert [chr(token) for token in allowed(matcher)] == ["a", "b"]
    assert matcher.accept(b"ac") == 2
    assert [chr(token) for token in allowed(matcher)] == ["c"]
    assert matcher.accept([END]) == 0


def test_special_and_unknown_tokens_are_never_accepted_as_text(backend):
    matcher = backend.compile(spec("regex", r"[^z]*"))
    assert set(allowed(matcher)) == {*range(128), *range(0xC2, 0xF5), END} - {ord("z")}
    for token in (TOKENIZER.BOS, 258, WIDTH, 10**9, -1):
        assert matcher.accept([token]) == 0


def test_masks_of_a_batch_equal_masks_of_single_requests(backend):
    matchers = [
        backend.compile(spec("regex", "[a-f]+")),
        backend.compile(spec("choice", ["yes", "no"])),
        backend.compile(spec("json_schema", CALL["schema"])),
    ]
    matchers[1].accept(b"no")
    size = 4 * ((WIDTH + 31) // 32)
    words = bytearray(size * 3)
    backend.fill_bitmasks(matchers, memoryview(words))
    for index, matcher in enumerate(matchers):
        row = words[index * size : (index + 1) * size]
        assert [t for t in range(8 * size) if row[t // 8] >> t % 8 & 1] == allowed(matcher)


def test_a_compiled_grammar_is_reused_and_starts_at_the_beginning(backend):
    arguments = spec("regex", "found[0-9]")
    assert backend.find(arguments) is None
    first = backend.compile(arguments)
    first.accept(b"found")
    assert [chr(token) for token in allowed(backend.find(arguments))] == ["f"]


def test_cached_grammars_are_limited_in_bytes(monkeypatch):
    pytest.importorskip("xgrammar", reason=MISSING)
    monkeypatch.setattr("dovetail_structured_output_xgrammar.backend.MAX_CACHED_BYTES", 100_000)
    backend = XGrammar(GrammarContext(tokenizer=TOKENIZER, vocab_size=WIDTH))
    values = [spec("choice", [f"{number}" + "x" * 300]) for number in range(20)]
    for item in values:
        backend.compile(item)
    assert backend.find(values[0]) is None and backend.find(values[-1]) is not None
