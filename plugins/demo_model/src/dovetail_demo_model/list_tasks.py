"""Tasks about lists of words: sort, reverse, spell, count.

Contract: the words are lower-case words of `vocabulary.NOUNS`; commas separate the words of a list.
This module does not depend on how a model learns the tasks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from dovetail_demo_model.task import Facts, Task, phrase
from dovetail_demo_model.vocabulary import NOUNS

MIN_SORTED, MAX_SORTED = 3, 5
MIN_REVERSED, MAX_REVERSED = 3, 6
MIN_COUNTED, MAX_COUNTED = 3, 9

_NOUN_SET = frozenset(NOUNS)
_LIST = re.compile(r"\w+(?:, \w+)+")

_SORT_PHRASINGS = (
    "Sort these words: {items}",
    "Put these words in alphabetical order: {items}",
    "Sort this list from A to Z: {items}",
    "Sort alphabetically: {items}",
    "Sort: {items}",
)

_REVERSE_PHRASINGS = (
    "Reverse this list: {items}",
    "Say these words backwards: {items}",
    "Reverse the order of these words: {items}",
    "Write this list from last to first: {items}",
    "Reverse: {items}",
)

_SPELL_PHRASINGS = (
    "Spell {items}.",
    "How do you spell {items}?",
    "Please spell {items}.",
    "Spell out {items}.",
    "Write the letters of {items}.",
)

_COUNT_PHRASINGS = (
    "How many words are in this list: {items}?",
    "Count these words: {items}",
    "How many words are there: {items}?",
    "Count the words in this list: {items}",
    "Count: {items}",
)


def _read_list(prompt: str) -> Facts:
    match = _LIST.search(prompt)
    if match is None:
        raise ValueError(f"the question {prompt!r} must contain a list with commas")
    return tuple(match[0].split(", "))


def _same_list(expected: Sequence[str], text: str) -> bool:
    matches = _LIST.findall(text)
    return bool(matches) and matches[-1] == ", ".join(expected)


def _ask_sort(rng: Random) -> str:
    length = rng.randint(MIN_SORTED, MAX_SORTED)
    return phrase(rng, _SORT_PHRASINGS, items=", ".join(rng.sample(NOUNS, length)))


SORT = Task(
    name="sort",
    description=f"Sort {MIN_SORTED} to {MAX_SORTED} words alphabetically.",
    ask=_ask_sort,
    read=_read_list,
    answer=lambda facts: f"Sorted: {', '.join(sorted(facts))}.",
    grade=lambda facts, text: _same_list(sorted(facts), text),
)


def _ask_reverse(rng: Random) -> str:
    words = rng.sample(NOUNS, rng.randint(MIN_REVERSED, MAX_REVERSED))
    return phrase(rng, _REVERSE_PHRASINGS, items=", ".join(words))


REVERSE = Task(
    name="reverse",
    description=f"Write a list of {MIN_REVERSED} to {MAX_REVERSED} words from last to first.",
    ask=_ask_reverse,
    read=_read_list,
    answer=lambda facts: f"Reversed: {', '.join(reversed(facts))}.",
    grade=lambda facts, text: _same_list(facts[::-1], text),
)


def _ask_spell(rng: Random) -> str:
    words = rng.sample(NOUNS, rng.choice((1, 2, 2, 2, 3)))
    items = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return phrase(rng, _SPELL_PHRASINGS, items=items)


def _read_spell(prompt: str) -> Facts:
    words = tuple(word for word in re.findall(r"[a-z]+", prompt) if word in _NOUN_SET)
    if not words:
        raise ValueError(f"the question {prompt!r} must contain a word that the model knows")
    return words


def _answer_spell(facts: Facts) -> str:
    return "; ".join(f"{word}: {' '.join(word)}" for word in facts) + "."


SPELL = Task(
    name="spell",
    description="Spell one to three words, letter by letter.",
    ask=_ask_spell,
    read=_read_spell,
    answer=_answer_spell,
    grade=lambda facts, text: text.rstrip(" .") == _answer_spell(facts).rstrip("."),
)


def _ask_count(rng: Random) -> str:
    words = rng.sample(NOUNS, rng.randint(MIN_COUNTED, MAX_COUNTED))
    return phrase(rng, _COUNT_PHRASINGS, items=", ".join(words))


def _answer_count(facts: Facts) -> str:
    counted = ", ".join(f"{i} {word}" for i, word in enumerate(facts, start=1))
    return f"{counted}: there are {len(facts)} words."


def _grade_count(facts: Facts, text: str) -> bool:
    return re.findall(r"\d+", text)[-1:] == [str(len(facts))]


COUNT = Task(
    name="count",
    description=f"Count the words of a list of {MIN_COUNTED} to {MAX_COUNTED} words.",
    ask=_ask_count,
    read=_read_list,
    answer=_answer_count,
    grade=_grade_count,
)
