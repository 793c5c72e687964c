"""What a task is: a question that a program can ask, read back, answer and grade.

Contract: a task is four pure functions. `ask` draws a question, `read` finds the facts in a
question, `answer` writes the right answer from the facts, and `grade` judges any text against the
facts. Whether a question is held out from training depends on its facts alone, not on its wording:
a question that is held out is held out in every phrasing. This module knows no single task and no
model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

HELD_OUT_SHARE = 50
"""One question in so many is held out from training."""

Facts = tuple[Any, ...]


def _same(facts: Facts) -> Facts | None:
    return facts


@dataclass(frozen=True, kw_only=True)
class Task:
    """Describe one kind of question whose answers a program verifies.

    `name` is short and unique; `description` is one line for people. The four functions are pure,
    apart from `ask`, which draws from the generator that it is given. `read` raises ValueError for
    a text that is not a question of this task. `canonical` gives the facts in the form that decides
    the split, or None for a question so basic that it is always taught.
    """

    name: str
    description: str
    ask: Callable[[Random], str]
    read: Callable[[str], Facts]
    answer: Callable[[Facts], str]
    grade: Callable[[Facts, str], bool]
    canonical: Callable[[Facts], Facts | None] = _same

    def make(self, rng: Random) -> tuple[str, str]:
        """Draw a question and give it with its right answer: (prompt, answer)."""
        prompt = loosen(rng, self.ask(rng))
        return prompt, self.answer(self.read(prompt))

    def check(self, prompt: str, answer_text: str) -> bool:
        """Say whether `answer_text` answers `prompt`; raise ValueError for a foreign prompt."""
        return self.grade(self.read(prompt), answer_text.strip())

    def is_held_out(self, prompt: str) -> bool:
        """Say whether training must never see this question, in whatever words it is asked."""
        canonical = self.canonical(self.read(prompt))
        if canonical is None:
            return False
        digest = hashlib.sha256(f"{self.name}:{canonical!r}".encode()).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0

    def draw(self, rng: Random, *, held_out: bool) -> tuple[str, str]:
        """Draw (prompt, answer) from the held-out questions, or from all the others."""
        while True:
            prompt, answer = self.make(rng)
            if self.is_held_out(prompt) == held_out:
                return prompt, answer


def held_out_set(task: Task, count: int, seed: int) -> list[tuple[str, str]]:
    """Draw `count` different held-out questions of `task`, as (prompt, answer), from a seed."""
    rng = Random(f"{task.name}:{seed}")
    found: dict[str, str] = {}
    while len(found) < count:
        prompt, answer = task.draw(rng, held_out=True)
        found[prompt] = answer
    return list(found.items())


def loosen(rng: Random, prompt: str) -> str:
    """Write a question as people type it: now and then a small first letter, no final mark."""
    if rng.random() < 0.15 and prompt[-1] in "?.":
        prompt = prompt[:-1]
    dice = rng.random()
    starts_with_word = prompt[1].islower() and prompt.split()[0] not in ("Today", "JSON")
    if not starts_with_word:
        return prompt
    if dice < 0.2:
        return prompt[0].lower() + prompt[1:]
    if dice < 0.27 and not prompt.endswith("?"):
        return "Please " + prompt[0].lower() + prompt[1:]
    return prompt


def phrase(rng: Random, phrasings: Sequence[str], **values: object) -> str:
    """Fill a phrasing, picked at random, with values."""
    return rng.choice(phrasings).format(**values)
