"""The functions that the demo model learns to call: add, multiply, weekday, weather, person.

Contract: a function draws the values of a question, writes the question, computes the result and
writes the answer. The names of functions and parameters vary, so that a model must read them
from the definitions in the prompt. This module does not depend on how definitions or calls are
written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any

from dovetail_demo_model.number_tasks import MAX_TERM, SUM_PHRASINGS
from dovetail_demo_model.task import facts_are_held_out, loosen, phrase
from dovetail_demo_model.vocabulary import CITIES, NAMES, WEEKDAYS

MAX_ADDED = 9999
MAX_FACTOR = 999
MAX_DAYS = 999
FIRST_DAY, LAST_DAY = date(1990, 1, 1), date(2039, 12, 31)

Values = tuple[Any, ...]

_PRODUCT_PHRASINGS = (
    "What is {a} * {b}?",
    "{a} * {b}",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
    "What is the product of {a} and {b}?",
    "Calculate {a} * {b}.",
)

_DATE_PHRASINGS = (
    "What day of the week is {day}?",
    "Which weekday is {day}?",
    "What weekday is {day}?",
)

_LATER_PHRASINGS = (
    "What day of the week is {n} after {day}?",
    "Which weekday is {n} after {day}?",
    "What weekday comes {n} after {day}?",
    "It is {day}. What weekday is it in {n}?",
    "{n} after {day}",
)

_EARLIER_PHRASINGS = (
    "What day of the week was {n} before {day}?",
    "Which weekday was {n} before {day}?",
    "It is {day}. What weekday was it {n} ago?",
    "{n} before {day}",
)

_WEATHER_PHRASINGS = (
    "What is the weather in {city} {day}?",
    "How is the weather in {city} {day}?",
    "What will the weather be in {city} {day}?",
    "The weather in {city} {day}",
    "Is it warm in {city} {day}?",
)

_PERSON_PHRASINGS = (
    "{name} is {age} years old.",
    "Extract: {name} is {age} years old.",
    "My name is {name} and I am {age} years old.",
    "{name}, age {age}",
    "Save {name}, who is {age} years old.",
)

_SKIES = ("sunny", "cloudy", "rain", "snow", "fog", "wind", "storm", "clear")
_DAYS = ("today", "tomorrow", *WEEKDAYS)


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function that a question can need.

    names: the names it can have. parameters: for each way to name its parameters, pairs of a name
    and a JSON type. draw: draws the values of a call. ask: writes a question for the values.
    compute: returns the result. sentence: writes the answer from values and result.
    canonical: returns the name and the facts that decide whether a question is held out.
    """

    names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[tuple[str, str], ...], ...]
    draw: Callable[[Random], Values]
    ask: Callable[[Random, Values], str]
    compute: Callable[[Random, Values], Any]
    sentence: Callable[[Values, Any], str]
    canonical: Callable[[Values], tuple[str, Values]]

    def define(self, rng: Random) -> dict[str, Any]:
        """Return an OpenAI function definition with names that are chosen at random."""
        names = dict(rng.choice(self.parameters))
        if rng.random() < 0.2:
            names = {name: kind.replace("integer", "number") for name, kind in names.items()}
        return definition(rng.choice(self.names), self.description, names)

    def draw_values(self, rng: Random, *, held_out: bool) -> Values:
        """Draw values from the held-out values, or from all other values."""
        while True:
            values = self.draw(rng)
            if facts_are_held_out(*self.canonical(values)) == held_out:
                return values

    def question(self, rng: Random, values: Values) -> str:
        """Write a question for `values` with a random phrasing."""
        return loosen(rng, self.ask(rng, values))


def definition(name: str, description: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return an OpenAI function definition.

    parameters: the JSON type by name; all of them are required.
    """
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def _number(rng: Random, largest: int) -> int:
    return rng.randint(0, rng.choice((MAX_TERM, MAX_TERM, 999, largest)))


def _draw_two(largest: int) -> Callable[[Random], Values]:
    return lambda rng: (_number(rng, largest), _number(rng, largest))


def _ask_two(phrasings: tuple[str, ...]) -> Callable[[Random, Values], str]:
    return lambda rng, values: phrase(rng, phrasings, a=values[0], b=values[1])


def _draw_date(rng: Random) -> Values:
    day = date.fromordinal(rng.randint(FIRST_DAY.toordinal(), LAST_DAY.toordinal()))
    number = rng.randint(1, rng.choice((12, MAX_DAYS)))
    return day.isoformat(), rng.choice((0, number, number, -number))


def _ask_date(rng: Random, values: Values) -> str:
    day, shift = values
    phrasings = (_EARLIER_PHRASINGS, _DATE_PHRASINGS, _LATER_PHRASINGS)[
        (shift > 0) - (shift < 0) + 1
    ]
    unit = "day" if abs(shift) == 1 else "days"
    return phrase(rng, phrasings, day=day, n=f"{abs(shift)} {unit}")


def weekday_of(day: str, shift: int) -> str:
    """Return the weekday `shift` days after an ISO date. Raises ValueError for any other text."""
    return WEEKDAYS[(date.fromisoformat(day) + timedelta(days=shift)).weekday()]


def _ask_weather(rng: Random, values: Values) -> str:
    city, day = values
    when = f"on {day}" if day in WEEKDAYS else day
    return phrase(rng, _WEATHER_PHRASINGS, city=city, day=when)


FUNCTIONS: dict[str, Function] = {
    "add": Function(
        names=("add", "add", "add_numbers", "sum", "plus"),
        description="Add two numbers.",
        parameters=tuple(
            ((first, "integer"), (second, "integer"))
            for first, second in (("a", "b"), ("x", "y"), ("first", "second"))
        ),
        draw=_draw_two(MAX_ADDED),
        ask=_ask_two(SUM_PHRASINGS),
        compute=lambda rng, values: values[0] + values[1],
        sentence=lambda values, result: f"{values[0]} + {values[1]} = {result}.",
        canonical=lambda values: ("sum", tuple(sorted(values))),
    ),
    "multiply": Function(
        names=("multiply", "multiply", "product", "times"),
        description="Multiply two numbers.",
        parameters=tuple(
            ((first, "integer"), (second, "integer"))
            for first, second in (("a", "b"), ("x", "y"), ("first", "second"))
        ),
        draw=_draw_two(MAX_FACTOR),
        ask=_ask_two(_PRODUCT_PHRASINGS),
        compute=lambda rng, values: values[0] * values[1],
        sentence=lambda values, result: f"{values[0]} * {values[1]} = {result}.",
        canonical=lambda values: ("multiply", tuple(sorted(values))),
    ),
    "weekday": Function(
        names=("weekday", "weekday", "day_of_week", "get_weekday"),
        description="Return the weekday of the date that is a number of days after a date.",
        parameters=tuple(
            ((first, "string"), (second, "integer"))
            for first, second in (("date", "days"), ("date", "days"), ("start", "shift"))
        ),
        draw=_draw_date,
        ask=_ask_date,
        compute=lambda rng, values: weekday_of(*values),
        sentence=lambda values, result: f"It is {result}.",
        canonical=lambda values: ("weekday", values),
    ),
    "weather": Function(
        names=("weather", "weather", "get_weather", "forecast"),
        description="Return the weather in a city on a day.",
        parameters=tuple(
            ((first, "string"), (second, "string"))
            for first, second in (("city", "day"), ("city", "day"), ("location", "when"))
        ),
        draw=lambda rng: (rng.choice(CITIES), rng.choice(_DAYS)),
        ask=_ask_weather,
        compute=lambda rng, values: f"{rng.choice(_SKIES)}, {rng.randint(-9, 39)} degrees",
        sentence=lambda values, result: f"The weather in {values[0]}: {result}.",
        canonical=lambda values: ("weather", values),
    ),
    "person": Function(
        names=("User", "Person", "save_person", "person"),
        description="Save the name and the age of a person.",
        parameters=((("name", "string"), ("age", "integer")),),
        draw=lambda rng: (rng.choice(NAMES), rng.randint(1, 99)),
        ask=lambda rng, v: phrase(rng, _PERSON_PHRASINGS, name=v[0], age=v[1]),
        compute=lambda rng, values: rng.choice(("saved", "stored", "known")),
        sentence=lambda values, result: f"{values[0]} is {result}.",
        canonical=lambda values: ("person", values),
    ),
}

DECOYS: tuple[dict[str, Any], ...] = (
    definition("search", "Search the web.", {"query": "string"}),
    definition("translate", "Translate a text.", {"text": "string", "language": "string"}),
    definition("send_email", "Send an email.", {"to": "string", "text": "string"}),
    definition("get_time", "Return the time of day.", {}),
)
"""Definitions of functions that no question needs."""
