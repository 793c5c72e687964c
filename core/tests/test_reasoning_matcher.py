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
    given = {"end": "</t>"} | fields
    inner = None if grammar is None else answer(grammar)
    return ReasoningMatcher(inner, ReasoningParams(**given), TOKENIZER)


def allowed(one):
    words = bytearray(4 * ((WIDTH + 31) // 32))
    one.fill_bitmask(memoryview(words))
    return {token for token in range(WIDTH) if words[token // 8] >> token % 8 & 1}


def test_the_grammar_applies_after_the_marker_that_ends_the_reasoning():
    one = matcher()
    for token in ids("I think </t"):
        assert not one.masks
        assert one.accept([token]) == 1
    assert one.accept(ids(">")) == 1
    assert one.masks and allowed(one) == set(ids("o"))
    assert one.accept(ids("ox")) == 1
    assert one.accept(ids("k")) == 1
    assert one.is_finished() and allowed(one) == {END}


def test_an_output_without_the_first_marker_is_an_answer_from_its_first_token():
    one = matcher(start="<t>")
    assert allowed(one) == {*ids("<"), *ids("o")}
    assert one.accept(ids("ok")) == 2
    one = matcher(start="<t>")
    assert one.accept(ids("<t>x</t>ok")) == 10
    assert one.is_finished()


def test_the_marker_is_forced_when_the_limit_of_reasoning_tokens_is_reached():
    for budget in (0, 1, 5):
        one = matcher(None, budget=budget)
        for token in ids("abcde")[:budget]:
            assert not one.masks
            assert one.accept([token]) == 1
        for token in ids("</t>"):
            assert one.masks and allowed(one) == {token}
            assert one.accept(ids("x")) == 0
            assert one.accept([token]) == 1
        assert one.in_answer and not one.masks


def test_rollback_restores_every_earlier_state():
    for fields in ({}, {"budget": 2}, {"start": "a"}):
        for seed in range(20):
            check_rollback(matcher(**fields), ids("ab</t>ok"), random.Random(seed))


def check_rollback(one, tokens, draw):
    """Accept tokens, and undo some of them at random places."""
    masks = []
    while len(masks) < len(tokens):
        masks.append(allowed(one))
        assert one.accept([tokens[len(masks) - 1]]) == 1
        back = draw.randrange(1, len(masks) + 1) if draw.random() < 0.4 else 0
        if back:
            one.rollback(back)
            assert allowed(one) == masks[-back]
            del masks[-back:]
    assert one.is_finished()


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
def test_a_wrong_reasoning_parameter_is_refused_by_name(fields, name):
    with pytest.raises(RequestError) as refusal:
        ReasoningParams(**fields)
    assert refusal.value.parameter == name
