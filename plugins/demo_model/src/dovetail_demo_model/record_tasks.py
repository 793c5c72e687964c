"""Tasks about dates and records: calendar arithmetic, JSON.

Contract: calendar questions name a weekday or a month, a number and a direction; JSON questions
name pairs of a key and a value. This module does not depend on how a model learns the tasks.
"""

from __future__ import annotations

import json
import re
from random import Random

from dovetail_demo_model.task import Facts, Task, phrase
from dovetail_demo_model.vocabulary import CITIES, COLORS, MONTHS, NAMES, NOUNS, WEEKDAYS

MAX_SHIFT = 60
MIN_FIELDS, MAX_FIELDS = 2, 4

_AFTER_PHRASINGS = (
    "What {kind} is {n} {units} after {start}?",
    "Which {kind} comes {n} {units} after {start}?",
    "It is {start}. What {kind} is it in {n} {units}?",
    "If it is {start} now, what {kind} is it in {n} {units}?",
    "{n} {units} after {start}",
)

_BEFORE_PHRASINGS = (
    "What {kind} is {n} {units} before {start}?",
    "Which {kind} comes {n} {units} before {start}?",
    "It is {start}. What {kind} was it {n} {units} ago?",
    "If it is {start} now, what {kind} was it {n} {units} ago?",
    "{n} {units} before {start}",
)

_JSON_PHRASINGS = (
    "Write JSON: {fields}",
    "Write this as JSON: {fields}",
    "Give me JSON with {fields}.",
    "Turn this into JSON: {fields}",
    "JSON: {fields}",
)

_ANY_NAME = re.compile("|".join(WEEKDAYS + MONTHS))
_KEYS = ("name", "age", "city", "color", "item", "count")
_PAIR = re.compile(rf"\b({'|'.join(_KEYS)})(?: =|:)? (\w+)")


def _cycle(name: str) -> tuple[tuple[str, ...], str, str]:
    if name in WEEKDAYS:
        return WEEKDAYS, "day", "week"
    return MONTHS, "month", "year"


def _plural(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def _ask_calendar(rng: Random) -> str:
    start = rng.choice(rng.choice((WEEKDAYS, MONTHS)))
    number = rng.randint(1, rng.choice((12, MAX_SHIFT, MAX_SHIFT)))
    _, unit, _ = _cycle(start)
    return phrase(
        rng,
        rng.choice((_AFTER_PHRASINGS, _BEFORE_PHRASINGS)),
        kind=unit,
        n=number,
        units=unit if number == 1 else unit + "s",
        start=start,
    )


def _read_calendar(prompt: str) -> Facts:
    start = _ANY_NAME.search(prompt)
    number = re.search(r"\d+", prompt)
    if start is None or number is None:
        raise ValueError(f"the question {prompt!r} must contain a weekday or month and a number")
    sign = -1 if re.search(r"\b(before|ago)\b", prompt) else 1
    return start[0], sign * int(number[0])


def _way(facts: Facts) -> list[str]:
    """List the days or months from start to answer, leaving out complete weeks or years."""
    start, shift = facts
    names, _, _ = _cycle(start)
    first, step = names.index(start), 1 if shift > 0 else -1
    return [names[(first + step * i) % len(names)] for i in range(abs(shift) % len(names) + 1)]


def _answer_calendar(facts: Facts) -> str:
    start, shift = facts
    names, unit, group = _cycle(start)
    whole, rest = divmod(abs(shift), len(names))
    way = _way(facts)
    verb = "is" if shift > 0 else "was"
    counted = ", ".join(f"{i} {name}" for i, name in enumerate(way[1:], start=1))
    if whole:
        parts = f"{_plural(whole, group)} and {_plural(rest, unit)}"
        counted = f"{_plural(abs(shift), unit)} are {parts}" + (f": {counted}" if rest else "")
    return f"{counted}. It {verb} {way[-1]}."


CALENDAR = Task(
    name="calendar",
    description=f"Name the day or month up to {MAX_SHIFT} days or months before or after another.",
    ask=_ask_calendar,
    read=_read_calendar,
    answer=_answer_calendar,
    grade=lambda facts, text: _ANY_NAME.findall(text)[-1:] == [_way(facts)[-1]],
)


def _value(rng: Random, key: str) -> object:
    if key in ("age", "count"):
        return rng.randint(1, 99)
    return rng.choice({"name": NAMES, "city": CITIES, "color": COLORS, "item": NOUNS}[key])


def _ask_json(rng: Random) -> str:
    keys = rng.sample(_KEYS, rng.randint(MIN_FIELDS, MAX_FIELDS))
    glue = rng.choice((" ", " = ", ": "))
    fields = ", ".join(f"{key}{glue}{_value(rng, key)}" for key in keys)
    return phrase(rng, _JSON_PHRASINGS, fields=fields)


def _read_json(prompt: str) -> Facts:
    pairs = _PAIR.findall(prompt)
    if len(pairs) < MIN_FIELDS:
        raise ValueError(f"the question {prompt!r} must contain at least {MIN_FIELDS} fields")
    return tuple((key, int(value) if value.isdigit() else value) for key, value in pairs)


def _grade_json(facts: Facts, text: str) -> bool:
    try:
        return bool(json.loads(text) == dict(facts))
    except json.JSONDecodeError:
        return False


JSON = Task(
    name="json",
    description=f"Write {MIN_FIELDS} to {MAX_FIELDS} fields as a JSON object.",
    ask=_ask_json,
    read=_read_json,
    answer=lambda facts: json.dumps(dict(facts)),
    grade=_grade_json,
)
