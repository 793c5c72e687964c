"""Grammars that apply after the reasoning of a request, and the limit of reasoning tokens."""

from __future__ import annotations

import random

import pytest

from dovetail.engine.reasoning import ReasoningMatcher
from dovetail.errors import RequestError
from dovetail.sampling_params import ReasoningParams
from dovetail_devkit.fakes.grammar import FakeMatcher
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
END = TOKENIZER.eos_token_id
WIDTH = TOKENIZER.vocab_size


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def answer(text="ok"):
    return FakeMatcher([frozenset({token}) for token in ids(text)], frozenset({END}))


def matcher(grammar="ok", **fields):
    kwargs = {"end": "</t>"} | fields
    inner = None if grammar is None else answer(grammar)
    return ReasoningMatcher(inner, ReasoningParams(**kwargs), TOKENIZER)


def allowed(first):
    words = bytearray(4 * ((WIDTH + 31) // 32))
    first.fill_bitmask(memoryview(words))
    return {token for token in range(WIDTH) if words[token // 8] >> token % 8 & 1}


def test_the_grammar_applies_after_the_marker_that_ends_the_reasoning():
    reasoning_matcher = matcher()
    for token in ids("I think </t"):
        assert not reasoning_matcher.masks
        assert reasoning_matcher.accept([token]) == 1
    assert reasoning_matcher.accept(ids(">")) == 1
    assert reasoning_matcher.masks and allowed(reasoning_matcher) == set(ids("o"))
    assert reasoning_matcher.accept(ids("ox")) == 1
    assert reasoning_matcher.accept(ids("k")) == 1
    assert reasoning_matcher.is_finished() and allowed(reasoning_matcher) == {END}


def test_an_output_without_the_first_marker_has_no_reasoning():
    reasoning_matcher = matcher(start="<t>")
    assert allowed(reasoning_matcher) == {*ids("<"), *ids("o")}
    assert reasoning_matcher.accept(ids("ok")) == 2
    reasoning_matcher = matcher(start="<t>")
    assert reasoning_matcher.accept(ids("<t>x</t>ok")) == 10
    assert reasoning_matcher.is_finished()


def test_the_marker_is_forced_when_the_limit_of_reasoning_tokens_is_reached():
    for budget in (0, 1, 5):
        reasoning_matcher = matcher(None, budget=budget)
        for token in ids("abcde")[:budget]:
            assert not reasoning_matcher.masks
            assert reasoning_matcher.accept([token]) == 1
        for token in ids("</t>"):
            assert reasoning_matcher.masks and allowed(reasoning_matcher) == {token}
            assert reasoning_matcher.accept(ids("x")) == 0
            assert reasoning_matcher.accept([token]) == 1
        assert reasoning_matcher.in_answer and not reasoning_matcher.masks


def test_rollback_restores_every_earlier_state():
    for fields in ({}, {"budget": 2}, {"start": "a"}):
        for seed in range(20):
            check_rollback(matcher(**fields), ids("ab</t>ok"), random.Random(seed))


def check_rollback(first, tokens, rng):
    """Accept tokens, and undo some of them at random positions."""
    masks = []
    while len(masks) < len(tokens):
        masks.append(allowed(first))
        assert first.accept([tokens[len(masks) - 1]]) == 1
        back = rng.randrange(1, len(masks) + 1) if rng.random() < 0.4 else 0
        if back:
            first.rollback(back)
            assert allowed(first) == masks[-back]
            del masks[-back:]
    assert first.is_finished()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"end": ""}, "reasoning.end"),
        ({"end": "x" * 65}, "reasoning.end"),
        ({"end": 3}, "reasoning.end"),
        ({"end": "x", "start": None}, "reasoning.start"),
        ({"end": "x", "budget": -1}, "reasoning.budget"),
        ({"end": "x", "budget": "5"}, "reasoning.budget"),
    ],
)
def test_the_error_for_an_invalid_reasoning_parameter_names_it(fields, name):
    with pytest.raises(RequestError) as rejection:
        ReasoningParams(**fields)
    assert rejection.value.parameter == name
