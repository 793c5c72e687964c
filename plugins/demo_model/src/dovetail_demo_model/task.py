"""Defines the class of a task: a kind of question that a program can ask, parse, answer and grade.

Contract: a task consists of four pure functions. `ask` draws a question, `read` finds the facts in
a question, `answer` writes the correct answer from the facts, and `grade` checks any text against
the facts. Whether a question is held out from training depends only on its facts, not on its
wording: a held-out question is held out in every phrasing. This module defines no task and does not
depend on a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from dovetail_demo_model.vocabulary import NAMES

HELD_OUT_SHARE = 50
"""One of 50 questions is held out from training."""

Facts = tuple[Any, ...]


def _same(facts: Facts) -> Facts | None:
    return facts


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of question with answers that a program verifies.

    `name` is short and unique; `description` is one line for readers. The four functions are pure,
    except `ask`, which draws from the given generator. `read` raises ValueError for a text that is
    not a question of this task. `canonical` returns the facts in the form that decides whether the
    question is held out, or None for a basic question that is never held out.
    """

    name: str
    description: str
    ask: Callable[[Random], str]
    read: Callable[[str], Facts]
    answer: Callable[[Facts], str]
    grade: Callable[[Facts, str], bool]
    canonical: Callable[[Facts], Facts | None] = _same

    def make(self, rng: Random) -> tuple[str, str]:
        """Draw a question. Return it with its correct answer as (prompt, answer)."""
        prompt = loosen(rng, self.ask(rng))
        return prompt, self.answer(self.read(prompt))

    def check(self, prompt: str, answer_text: str) -> bool:
        """Return whether the answer is correct.

        Raises ValueError if `prompt` is not a question of this task.
        """
        return self.grade(self.read(prompt), answer_text.strip())

    def is_held_out(self, prompt: str) -> bool:
        """Return whether this question is held out from training, in any wording."""
        canonical = self.canonical(self.read(prompt))
        if canonical is None:
            return False
        return facts_are_held_out(self.name, canonical)

    def draw(self, rng: Random, *, held_out: bool) -> tuple[str, str]:
        """Draw (prompt, answer) from the held-out questions, or from all other questions."""
        while True:
            prompt, answer = self.make(rng)
            if self.is_held_out(prompt) == held_out:
                return prompt, answer


def facts_are_held_out(name: str, facts: Facts, *, share: int = HELD_OUT_SHARE) -> bool:
    """Return whether a question of the task `name` with these canonical facts is held out.

    share: one of `share` questions is held out.
    """
    digest = hashlib.sha256(f"{name}:{facts!r}".encode()).digest()
    return int.from_bytes(digest, "big") % share == 0


def held_out_set(task: Task, count: int, seed: int) -> list[tuple[str, str]]:
    """Draw `count` different held-out questions of `task`, as (prompt, answer), from a seed."""
    rng = Random(f"{task.name}:{seed}")
    results: dict[str, str] = {}
    while len(results) < count:
        prompt, answer = task.draw(rng, held_out=True)
        results[prompt] = answer
    return list(results.items())


def loosen(rng: Random, prompt: str) -> str:
    """Change a question at random: first letter in lower case, "Please", or no final "." or "?"."""
    if rng.random() < 0.15 and prompt[-1] in "?.":
        prompt = prompt[:-1]
    dice = rng.random()
    first = prompt.split()[0].rstrip(",")
    starts_with_word = prompt[1].islower() and first not in ("Today", "JSON", *NAMES)
    if not starts_with_word:
        return prompt
    if dice < 0.2:
        return prompt[0].lower() + prompt[1:]
    if dice < 0.27 and not prompt.endswith("?"):
        return "Please " + prompt[0].lower() + prompt[1:]
    return prompt


def phrase(rng: Random, phrasings: Sequence[str], **values: object) -> str:
    """Choose a phrasing at random and fill in the values."""
    return rng.choice(phrasings).format(**values)
