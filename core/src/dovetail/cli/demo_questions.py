"""The model and the questions of `dovetail demo`.

If the demo model is installed, its package contains the questions and checks the answers. If not, a
checkpoint with random weights is created, which continues a few prompts with random words. A model
that the user names answers simple questions, or continues these prompts if it has no chat template.
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
from dovetail.config.model_sources import find_model
from dovetail.plugins import PluginRegistry
from dovetail.plugins.resolving.plugin_policy import PluginPolicy

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
_QUESTIONS = {
    "Name the capital of France.": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "Which planet is closest to the sun?": "Mercury",
    "What is the chemical formula of water?": "H2O",
    "How many days are in a week?": "seven 7",
    "What color is the sky on a clear day?": "blue",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is the largest ocean on Earth?": "Pacific",
}
"""Questions for models with a chat template, and words; a correct answer has one of them."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt. is_right: a function that checks the answer, or None."""

    text: str
    is_right: Callable[[str], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that the demo runs.

    as_chat: whether the chat template is applied to questions. prompts: strings that replace the
    questions if the model has no chat template. max_tokens: maximum length of an answer.
    """

    model: str
    description: str
    questions: tuple[Question, ...]
    as_chat: bool = False
    prompts: tuple[Question, ...] = ()
    max_tokens: int = 16


@contextmanager
def demo_subject(model: str | None) -> Iterator[Subject]:
    """Yield the model of the demo with its questions.

    model: None for the demo model or, if it is not installed, a temporary random checkpoint.
    Raises OSError if no temporary directory can be created.
    """
    if model in (None, DEMO) and (tasks := _installed_tasks()):
        yield Subject(
            model=DEMO,
            description="asks the demo model ten questions that were not in its training data",
            questions=tuple(_question(task) for task in tasks.values()),
            as_chat=True,
            max_tokens=64,
        )
        return
    beginnings = tuple(Question(text=text) for text in _BEGINNINGS)
    if model is not None:
        yield Subject(
            model=model,
            description=f"gives {model} eight prompts",
            questions=tuple(
                Question(text=text, is_right=_any_of(words)) for text, words in _QUESTIONS.items()
            ),
            as_chat=True,
            prompts=beginnings,
            max_tokens=48,
        )
        return
    with tempfile.TemporaryDirectory(prefix="dovetail-demo-") as folder:
        yield Subject(
            model=str(write_random_checkpoint(Path(folder))),
            description="runs a tiny Llama with random weights, whose answers have no meaning",
            questions=beginnings,
        )


def _installed_tasks() -> dict[str, Any]:
    """Return the demo model's tasks by name, or {} if its package or weights are missing."""
    directory = find_model(DEMO, PluginRegistry(policy=PluginPolicy(no_plugins=True)))
    if directory is None or not (directory / "config.json").is_file():
        return {}
    try:
        # Imported by name, because the core must not depend on other packages of the project.
        tasks: dict[str, Any] = import_module(_TASKS).TASKS
    except ModuleNotFoundError:
        return {}
    return tasks


def _question(task: Any) -> Question:
    prompt, _ = task.draw(random.Random(f"{task.name}:{_SEED}"), held_out=True)
    return Question(text=prompt, is_right=lambda reply: bool(task.check(prompt, reply)))


def _any_of(words: str) -> Callable[[str], bool]:
    """Return a function that checks whether an answer contains one of `words`."""
    return lambda reply: any(word.lower() in reply.lower() for word in words.split())
