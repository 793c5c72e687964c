"""Tasks with functions: the model calls an offered function and answers from its result.

Contract: a tool question offers functions and has at most one correct call. The result of a
function is sometimes wrong, so that a model must copy the result instead of computing it.
Whether a question is held out depends on the values of its call. Calls are read in the Hermes
format (`parse_call`). This module does not depend on a chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from dovetail_demo_model.functions import DECOYS, FUNCTIONS, MAX_ADDED
from dovetail_demo_model.number_tasks import MAX_TERM
from dovetail_demo_model.tasks import TASKS

NO_FUNCTION = "I have no function for that."
FAILED = "The function failed."

_CALL = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
_WRONG_SHARE, _ERROR_SHARE, _DECOY_SHARE = 0.3, 0.05, 0.3
_ERRORS = ("Error: unknown", "Error: not found", "Error: time out", "Error: bad value")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One offered function: its name in `FUNCTIONS` ("" for a decoy) and its OpenAI definition."""

    function: str
    definition: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ToolTurn:
    """One question, the tool call that it needs, and its answer.

    `name` and `arguments` are the correct tool call; `name` is "" if no function is needed.
    `result` is the text that the function returns; "" without a tool call. `answer` is the correct
    final answer.
    """

    prompt: str
    answer: str
    name: str = ""
    arguments: Mapping[str, Any] | None = None
    result: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolQuestion:
    """A held-out question: the definitions of the offered functions, and the turn.

    `task` is the name of a task in `TASKS` whose checker grades the answer, or "".
    """

    tools: tuple[Mapping[str, Any], ...]
    turn: ToolTurn
    task: str = ""

    def check_call(self, text: str) -> bool:
        """Return whether `text` is the correct call, or False if no function is needed."""
        turn = self.turn
        return bool(turn.name) and parse_call(text) == (turn.name, turn.arguments)

    def check_answer(self, text: str) -> bool:
        """Return whether `text` is a correct final answer."""
        if self.task:
            return TASKS[self.task].check(self.turn.prompt, text)
        return text.strip() == self.turn.answer


def parse_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of the tool call `text`, or None if it is anything else."""
    match = _CALL.fullmatch(text.strip())
    try:
        call = json.loads(match[1]) if match else None
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return None
    return call["name"], call["arguments"]


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a tool call in the Hermes format."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def draw_offers(rng: Random, functions: Sequence[str]) -> tuple[Offer, ...]:
    """Offer `functions` under random names in random order, sometimes with a decoy."""
    offers = [Offer(function=f, definition=FUNCTIONS[f].define(rng)) for f in functions]
    if not offers or rng.random() < _DECOY_SHARE:
        offers.append(Offer(function="", definition=rng.choice(DECOYS)))
    rng.shuffle(offers)
    return tuple(offers)


def draw_call(rng: Random, offer: Offer, *, held_out: bool) -> ToolTurn:
    """Draw a question that needs the offered function, with its call, a result and the answer."""
    function = FUNCTIONS[offer.function]
    values = function.draw_values(rng, held_out=held_out)
    definition = offer.definition["function"]
    shown = function.draw(rng) if rng.random() < _WRONG_SHARE else values
    result = function.compute(rng, shown)
    failed = rng.random() < _ERROR_SHARE
    forms = (str(result), json.dumps(result), json.dumps({"result": result}))
    return ToolTurn(
        prompt=function.question(rng, values),
        name=definition["name"],
        arguments=dict(zip(definition["parameters"]["properties"], values, strict=True)),
        result=rng.choice(_ERRORS) if failed else rng.choice(forms),
        answer=FAILED if failed else function.sentence(values, result),
    )


def draw_missing(rng: Random, offers: Sequence[Offer], *, held_out: bool) -> ToolTurn:
    """Draw a question that needs a function which is not offered, with the refusal."""
    offered = {offer.function for offer in offers}
    name = rng.choice([name for name in FUNCTIONS if name not in offered])
    function = FUNCTIONS[name]
    values = function.draw_values(rng, held_out=held_out)
    while name == "add" and max(values) <= MAX_TERM:  # the model adds small numbers itself
        values = function.draw_values(rng, held_out=held_out)
    return ToolTurn(prompt=function.question(rng, values), answer=NO_FUNCTION)


def tasks_without_function(offers: Sequence[Offer]) -> list[str]:
    """List the names of the tasks that no offered function answers."""
    adds = any(offer.function == "add" for offer in offers)
    return [name for name in TASKS if not (adds and name == "sum")]


TOOL_TASKS: dict[str, str] = {
    "call_add": f"Call a function that adds two numbers up to {MAX_ADDED}; answer from its result.",
    "call_multiply": "Call a function that multiplies; answer from its result.",
    "call_weekday": "Call a function with a date and a number of days; answer from its result.",
    "call_weather": "Call a function with a city and a day; answer from its result.",
    "call_person": "Call a function with name and age of a person; answer from its result.",
    "no_call_needed": "Answer a question that needs none of the offered functions.",
    "no_function": "Refuse a question that no offered function answers.",
}
"""Descriptions of the tool tasks, by name."""


def held_out_tool_questions(task: str, count: int, seed: int) -> list[ToolQuestion]:
    """Draw `count` held-out questions of a task in `TOOL_TASKS`, from a seed."""
    rng = Random(f"{task}:{seed}")
    return [_draw_question(rng, task) for _ in range(count)]


def _draw_question(rng: Random, task: str) -> ToolQuestion:
    needed = task.removeprefix("call_")
    if needed in FUNCTIONS:
        other = rng.choice([name for name in FUNCTIONS if name != needed])
        offers = draw_offers(rng, (needed, other))
        offer = next(offer for offer in offers if offer.function == needed)
        return _question(offers, draw_call(rng, offer, held_out=True))
    offers = draw_offers(rng, rng.sample(list(FUNCTIONS), 2))
    if task == "no_function":
        return _question(offers, draw_missing(rng, offers, held_out=True))
    name = rng.choice(tasks_without_function(offers))
    prompt, answer = TASKS[name].draw(rng, held_out=True)
    return _question(offers, ToolTurn(prompt=prompt, answer=answer), name)


def _question(offers: Sequence[Offer], turn: ToolTurn, task: str = "") -> ToolQuestion:
    tools = tuple(offer.definition for offer in offers)
    return ToolQuestion(tools=tools, turn=turn, task=task)
