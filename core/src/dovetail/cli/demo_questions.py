"""What `dovetail demo` asks, and of which model.

The installed demo model brings tasks that grade their own answers; a checkpoint of random weights,
made for the occasion, says words without sense, and is asked to go on from some. Runs no model.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dovetail.cli.random_checkpoint import write_random_checkpoint
from dovetail.config.installed_checkpoints import find_installed_checkpoint

DEMO = "demo"
_TASKS = "dovetail_demo_model.tasks"
_SEED = 7
_BEGINNINGS = (
    "the sea is",
    "a bird can",
    "in the old town",
    "two ships came from",
    "music is",
    "read the book and",
    "the door was not",
    "say one word",
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt, and how to tell whether an answer is right; None: nobody can."""

    text: str
    is_right: Callable[[str], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that the demo runs.

    as_chat: whether it is asked through its chat template. max_tokens: of an answer, at most.
    """

    model: str
    description: str
    questions: tuple[Question, ...]
    as_chat: bool = False
    max_tokens: int = 16


@contextmanager
def demo_subject(model: str | None) -> Iterator[Subject]:
    """Yield what to ask of `model`; None: the demo model, else one made here and deleted after.

    Raises OSError if there is no place for a temporary directory.
    """
    if model in (None, DEMO) and (tasks := _installed_tasks()):
        yield Subject(
            model=DEMO,
            description="the demo model, asked what it never saw in training",
            questions=tuple(_question(task) for task in tasks.values()),
            as_chat=True,
            max_tokens=64,
        )
        return
    beginnings = tuple(Question(text=text) for text in _BEGINNINGS)
    if model is not None:
        yield Subject(model=model, description=model, questions=beginnings)
        return
    with tempfile.TemporaryDirectory(prefix="dovetail-demo-") as folder:
        yield Subject(
            model=str(write_random_checkpoint(Path(folder))),
            description="a tiny Llama with random weights, made just now: words without sense",
            questions=beginnings,
        )


def _installed_tasks() -> dict[str, Any]:
    """Return the demo model's tasks by name; empty where its package or its weights are not."""
    directory = find_installed_checkpoint(DEMO, first_party_only=True)
    if directory is None or not (directory / "config.json").is_file():
        return {}
    try:
        # By its name, as its entry point is: the core depends on no member.
        tasks: dict[str, Any] = import_module(_TASKS).TASKS
    except ModuleNotFoundError:
        return {}
    return tasks


def _question(task: Any) -> Question:
    prompt, _ = task.draw(random.Random(f"{task.name}:{_SEED}"), held_out=True)
    return Question(text=prompt, is_right=lambda answer: bool(task.check(prompt, answer)))
