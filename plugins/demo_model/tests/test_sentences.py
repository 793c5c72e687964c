"""Tests of the sentences of the embedding model: held-out data, wordings, nearest neighbors."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from dovetail_demo_model import embedding_dir
from dovetail_demo_model.sentences import (
    INTENTS,
    NUM_HELD_OUT_WORDINGS,
    VALUES,
    draw_pair,
    held_out_pairs,
    meanings,
    pair_accuracy,
)


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def test_each_intent_has_different_wordings_that_use_both_slots():
    assert len({intent.name for intent in INTENTS}) == len(INTENTS)
    wordings = [wording for intent in INTENTS for wording in intent.wordings]
    assert len(set(wordings)) == len(wordings)
    for intent in INTENTS:
        assert len(intent.wordings) == len(INTENTS[0].wordings) > NUM_HELD_OUT_WORDINGS
        for wording in intent.wordings:
            assert sorted(re.findall(r"{(\w+)}", wording)) == sorted(intent.slots), wording


def test_no_two_values_have_the_same_form():
    forms = [form for values in VALUES.values() for value in values for form in value]
    assert len(set(forms)) == len(forms)


def test_training_sentences_have_no_held_out_meaning_and_no_held_out_wording():
    trained, held_out = meanings(held_out=False), meanings(held_out=True)
    assert not set(trained) & set(held_out)
    assert len(held_out) > 0.15 * len(trained)
    rng = Random(4)
    sentences = {text for m in trained for text in draw_pair(rng, m, held_out=False)}
    others = {text for m in trained + held_out for text in draw_pair(rng, m, held_out=True)}
    assert not sentences & others


def test_held_out_sentences_contain_only_words_of_training_sentences():
    for intent in INTENTS:
        held_out = words(" ".join(intent.wordings[-NUM_HELD_OUT_WORDINGS:]))
        every = [w for i in INTENTS for w in i.wordings[:-NUM_HELD_OUT_WORDINGS]]
        assert held_out <= words(" ".join(every)), intent.name


def test_the_vocabulary_of_the_tokenizer_has_all_words():
    tokens = json.loads((embedding_dir() / "tokenizer.json").read_text())["model"]["vocab"]
    pairs = held_out_pairs(len(meanings(held_out=True)), 1)
    assert words(" ".join(text for pair in pairs for text in pair)) <= set(tokens)


def test_held_out_pairs_have_different_wordings_and_forms():
    pairs = held_out_pairs(100, 2026)
    assert pairs == held_out_pairs(100, 2026) != held_out_pairs(100, 2027)
    forms = [value for values in VALUES.values() for value in values]
    for first, second in pairs:
        assert first != second
        for value in forms:
            assert not any(form in first and form in second for form in value if len(form) > 5)


@pytest.mark.parametrize(
    ("vectors", "accuracy"),
    [
        ([[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0], [-0.8, -0.6]], 1.0),
        ([[1.0, 0.0], [-1.0, 0.0], [0.8, 0.6], [-0.8, -0.6]], 0.0),
        ([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [-1.0, 0.0]], 0.5),
    ],
)
def test_the_pair_accuracy_counts_vectors_next_to_their_partners(vectors, accuracy):
    assert pair_accuracy(vectors) == accuracy
