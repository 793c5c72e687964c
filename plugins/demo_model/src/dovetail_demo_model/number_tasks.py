"""Tasks about numbers: sum, difference, numbers in words, unit conversion.

Contract: all numbers are non-negative integers; constants at the top define the ranges. This module
does not depend on how a model learns the tasks.
"""

from __future__ import annotations

import re
from random import Random

from dovetail_demo_model.task import Facts, Task, phrase
from dovetail_demo_model.vocabulary import ONES, TENS

MAX_TERM = 99
MAX_SPOKEN = 9999

SUM_PHRASINGS = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
    "{a} + {b} = ?",
)

_DIFFERENCE_PHRASINGS = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "What is the difference between {a} and {b}?",
    "Calculate {a} - {b}.",
    "{a} - {b} = ?",
)

_SPOKEN_PHRASINGS = (
    "Write {n} in words.",
    "How do you say {n} in words?",
    "Spell out the number {n}.",
    "What is {n} in words?",
    "{n} in words",
)

_UNIT_PHRASINGS = (
    "How many {target} are {n} {source}?",
    "Convert {n} {source} to {target}.",
    "What is {n} {source} in {target}?",
    "{n} {source} in {target}",
    "How many {target} are there in {n} {source}?",
)

# (source, target) -> (factor, largest number in a question)
UNITS: dict[tuple[str, str], tuple[int, int]] = {
    ("kilometers", "meters"): (1000, 999),
    ("meters", "centimeters"): (100, 999),
    ("centimeters", "millimeters"): (10, 999),
    ("kilograms", "grams"): (1000, 999),
    ("liters", "milliliters"): (1000, 999),
    ("euros", "cents"): (100, 999),
    ("tons", "kilograms"): (1000, 999),
    ("decades", "years"): (10, 999),
    ("hours", "minutes"): (60, 60),
    ("minutes", "seconds"): (60, 60),
    ("years", "months"): (12, 60),
    ("feet", "inches"): (12, 60),
}
_SINGULAR = {"feet": "foot", "inches": "inch", "centimeters": "centimeter"}
_UNIT_NAMES = sorted({name for pair in UNITS for name in pair}, key=len, reverse=True)
_UNIT = "|".join(_UNIT_NAMES + [_SINGULAR.get(u, u[:-1]) for u in _UNIT_NAMES])
_PLURAL = {_SINGULAR.get(u, u[:-1]): u for u in _UNIT_NAMES}


def _integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _two_integers(prompt: str) -> tuple[int, int]:
    result = _integers(prompt)
    if len(result) != 2:
        raise ValueError(f"the question {prompt!r} must contain two numbers, found {result}")
    return result[0], result[1]


def _term(rng: Random) -> int:
    return rng.randint(0, rng.choice((20, MAX_TERM, MAX_TERM)))


def _ask_sum(rng: Random) -> str:
    return phrase(rng, SUM_PHRASINGS, a=_term(rng), b=_term(rng))


def _ask_difference(rng: Random) -> str:
    low, high = sorted((_term(rng), _term(rng)))
    return phrase(rng, _DIFFERENCE_PHRASINGS, a=high, b=low)


def _read_difference(prompt: str) -> Facts:
    # "Subtract 3 from 5" names the smaller number first; no question has a negative answer.
    return tuple(sorted(_two_integers(prompt), reverse=True))


def _ends_with(value: int, text: str) -> bool:
    result = _integers(text)
    return bool(result) and result[-1] == value


SUM = Task(
    name="sum",
    description=f"Add two numbers from 0 to {MAX_TERM}.",
    ask=_ask_sum,
    read=_two_integers,
    answer=lambda facts: f"{facts[0]} + {facts[1]} = {facts[0] + facts[1]}.",
    grade=lambda facts, text: _ends_with(facts[0] + facts[1], text),
    canonical=lambda facts: tuple(sorted(facts)),
)

DIFFERENCE = Task(
    name="difference",
    description=f"Subtract a number from an equal or larger one, both from 0 to {MAX_TERM}.",
    ask=_ask_difference,
    read=_read_difference,
    answer=lambda facts: f"{facts[0]} - {facts[1]} = {facts[0] - facts[1]}.",
    grade=lambda facts, text: _ends_with(facts[0] - facts[1], text) and "= -" not in text,
)


def in_words(number: int) -> str:
    """Write a number from 0 to 9999 in English words, without hyphens and without "and"."""
    if not 0 <= number <= MAX_SPOKEN:
        raise ValueError(f"in_words accepts numbers from 0 to {MAX_SPOKEN}, got {number}")
    parts = []
    if number >= 1000:
        parts += [ONES[number // 1000], "thousand"]
    if number % 1000 >= 100:
        parts += [ONES[number % 1000 // 100], "hundred"]
    rest = number % 100
    if rest >= 20:
        parts.append(TENS[rest // 10])
        rest %= 10
    if rest or not parts:
        parts.append(ONES[rest])
    return " ".join(parts)


def _ask_spoken(rng: Random) -> str:
    limit = rng.choice((99, 999, 999, MAX_SPOKEN, MAX_SPOKEN))
    return phrase(rng, _SPOKEN_PHRASINGS, n=rng.randint(0, limit))


def _read_spoken(prompt: str) -> Facts:
    result = _integers(prompt)
    if len(result) != 1:
        raise ValueError(f"the question {prompt!r} must contain one number, found {result}")
    return tuple(result)


NUMBER_WORDS = Task(
    name="number_words",
    description=f"Write a number from 0 to {MAX_SPOKEN} in words.",
    ask=_ask_spoken,
    read=_read_spoken,
    answer=lambda facts: f"{facts[0]} is {in_words(facts[0])}.",
    grade=lambda facts, text: text.rstrip(" .").split(" is ")[-1] == in_words(facts[0]),
    # Numbers below 100 are always in the training data; some larger ones are held out.
    canonical=lambda facts: facts if facts[0] >= 100 else None,
)


def _name_unit(number: int, unit: str) -> str:
    return _SINGULAR.get(unit, unit[:-1]) if number == 1 else unit


def _ask_units(rng: Random) -> str:
    (source, target), (_, limit) = rng.choice(list(UNITS.items()))
    number = rng.randint(1, rng.choice((min(limit, 99), limit)))
    return phrase(rng, _UNIT_PHRASINGS, n=number, source=_name_unit(number, source), target=target)


def _read_units(prompt: str) -> Facts:
    source = re.search(rf"\b(\d+) ({_UNIT})\b", prompt)
    if source is None:
        raise ValueError(f"the question {prompt!r} must contain a number and its unit")
    unit = _PLURAL.get(source[2], source[2])
    rest = prompt[: source.start()] + prompt[source.end() :]
    target = re.search(rf"\b({'|'.join(_UNIT_NAMES)})\b", rest)
    if target is None or (unit, target[1]) not in UNITS:
        raise ValueError(f"the question {prompt!r} must name a known target unit for {unit!r}")
    return int(source[1]), unit, target[1]


def _answer_units(facts: Facts) -> str:
    number, source, target = facts
    result = number * UNITS[source, target][0]
    return f"{number} {_name_unit(number, source)} = {result} {target}."


def _grade_units(facts: Facts, text: str) -> bool:
    number, source, target = facts
    result = number * UNITS[source, target][0]
    return _ends_with(result, text) and text.rstrip(" .").endswith(f"{result} {target}")


UNIT_CONVERSION = Task(
    name="units",
    description="Convert lengths, weights, volumes, times and money to a smaller unit.",
    ask=_ask_units,
    read=_read_units,
    answer=_answer_units,
    grade=_grade_units,
    # The model must memorize times and feet; only decimal conversions are held out.
    canonical=lambda facts: facts if UNITS[facts[1:]][0] in (10, 100, 1000) else None,
)
