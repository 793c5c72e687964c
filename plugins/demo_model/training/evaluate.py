"""Measure the accuracy of a saved model for each task, with greedy sampling in transformers.

Contract: loads the directory through the public API of the transformers library. An answer counts
as correct only if the task's checker accepts it and the model ended it. A question with functions
counts as correct only if the call (name and arguments) and the answer from its result are correct.
The script does not depend on the training scripts.

Usage: python evaluate.py FOLDER [--per-task 200] [--show 3] [--draft FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from dovetail_demo_model.tasks import TASKS, held_out_set
from dovetail_demo_model.tool_tasks import TOOL_TASKS, ToolQuestion, held_out_tool_questions

HELD_OUT_SEED = 2026
_BATCH = 50
_MAX_NEW_TOKENS = 112


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The result of one task: counts of correct answers and questions, and the wrong answers.

    wrong: (prompt, text) of each wrong answer.
    """

    num_right: int
    num_requested: int
    wrong: tuple[tuple[str, str], ...]

    @property
    def accuracy(self) -> float:
        """Return the share of correct answers, from 0 to 1."""
        return self.num_right / self.num_requested


class Answerer:
    """Answers prompts with a saved model, with greedy sampling, in batches."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16
        )
        self.model.eval()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the messages in the chat format, up to the start of the answer."""
        return self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )

    def answer(self, prompts: list[str]) -> list[tuple[str, bool]]:
        """Return (text, whether the model ended it) for each question."""
        return self.complete([self.render(_user_message(prompt)) for prompt in prompts])

    def complete(self, texts: list[str]) -> list[tuple[str, bool]]:
        """Return (text, whether the model ended it) for each rendered chat, in order."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        results: dict[int, tuple[str, bool]] = {}
        for start in range(0, len(texts), _BATCH):
            chosen = order[start : start + _BATCH]
            results.update(zip(chosen, self._batch([texts[i] for i in chosen]), strict=True))
        return [results[i] for i in range(len(texts))]

    def _batch(self, texts: list[str]) -> list[tuple[str, bool]]:
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            ids = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=_MAX_NEW_TOKENS,
                do_sample=False,
                temperature=None,
            )
        new = ids[:, batch["input_ids"].shape[1] :]
        ended = (new == self.tokenizer.eos_token_id).any(dim=1).tolist()
        decoded = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return list(zip(decoded, ended, strict=True))


def _user_message(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


def evaluate(folder: Path, per_task: int) -> dict[str, TaskResult]:
    """Ask `per_task` held-out questions of every task and grade the answers."""
    answerer = Answerer(folder)
    results = {}
    for task in TASKS.values():
        prompts = [prompt for prompt, _ in held_out_set(task, per_task, HELD_OUT_SEED)]
        graded = [
            (prompt, text, ended, ended and task.check(prompt, text))
            for prompt, (text, ended) in zip(prompts, answerer.answer(prompts), strict=True)
        ]
        results[task.name] = _result(graded)
    return results


def evaluate_tools(folder: Path, per_task: int) -> dict[str, TaskResult]:
    """Ask `per_task` held-out questions of every task with functions and grade call and answer."""
    answerer = Answerer(folder)
    results = {}
    for name in TOOL_TASKS:
        questions = held_out_tool_questions(name, per_task, HELD_OUT_SEED)
        first = answerer.complete(
            [answerer.render(_user_message(q.turn.prompt), q.tools) for q in questions]
        )
        graded = [
            _graded(question, text, ended)
            for question, (text, ended) in zip(questions, first, strict=True)
        ]
        called = [i for i, question in enumerate(questions) if question.turn.name and graded[i][-1]]
        chats = [
            answerer.render(_messages_with_call(questions[i]), questions[i].tools) for i in called
        ]
        for i, (text, ended) in zip(called, answerer.complete(chats), strict=True):
            right = ended and questions[i].check_answer(text)
            graded[i] = (questions[i].turn.prompt, text, ended, right)
        results[name] = _result(graded)
    return results


_Graded = tuple[str, str, bool, bool]


def _graded(question: ToolQuestion, text: str, ended: bool) -> _Graded:
    """Grade the first text: the tool call if a function is needed, otherwise the answer."""
    check = question.check_call if question.turn.name else question.check_answer
    return question.turn.prompt, text, ended, ended and check(text)


def _messages_with_call(question: ToolQuestion) -> list[dict[str, Any]]:
    """Return the messages up to the result of the correct call."""
    turn = question.turn
    call = {"type": "function", "function": {"name": turn.name, "arguments": turn.arguments}}
    return [
        *_user_message(turn.prompt),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": turn.result},
    ]


def _result(graded: Sequence[_Graded]) -> TaskResult:
    invalid = tuple(
        (prompt, text if ended else text + " [no end]")
        for prompt, text, ended, right in graded
        if not right
    )
    return TaskResult(
        num_right=len(graded) - len(invalid), num_requested=len(graded), wrong=invalid
    )


def agreement(folder: Path, draft: Path, per_task: int) -> float:
    """Return the share of answer positions where both models have the same most likely token.

    Both models read the main model's greedy answers to held-out questions (teacher forcing).
    """
    main, small = Answerer(folder), Answerer(draft)
    same = total = 0
    for task in TASKS.values():
        prompts = [prompt for prompt, _ in held_out_set(task, per_task, HELD_OUT_SEED)]
        for prompt, (text, _) in zip(prompts, main.answer(prompts), strict=True):
            head = main.render(_user_message(prompt))
            start = len(main.tokenizer(head, add_special_tokens=False).input_ids)
            full = head + text + main.tokenizer.eos_token
            ids = main.tokenizer(full, return_tensors="pt", add_special_tokens=False).input_ids
            with torch.inference_mode():
                first = main.model(ids).logits[0, start - 1 : -1].argmax(-1)
                second = small.model(ids).logits[0, start - 1 : -1].argmax(-1)
            same += int((first == second).sum())
            total += first.numel()
    return same / total


def main() -> None:
    """Print the accuracy of each task, and some wrong answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-task", type=int, default=200)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per task")
    parser.add_argument("--draft", type=Path, help="also print the top-1 agreement of this model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = evaluate(args.folder, args.per_task) | evaluate_tools(args.folder, args.per_task)
    for name, result in results.items():
        print(f"{name:14s} {result.num_right:4d}/{result.num_requested}  {result.accuracy:.1%}")
        for prompt, text in result.wrong[: args.show]:
            print(f"    {prompt!r} -> {text!r}")
    if args.draft:
        print(f"top-1 agreement {agreement(args.folder, args.draft, 20):.1%}")


if __name__ == "__main__":
    main()
