"""Every reasoning parser separates reasoning from content, in whole texts and in random pieces."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dovetail.interfaces import ReasoningParser, ReasoningParserContext
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_parsers import REASONING_PARSERS

EXAMPLES = {
    "think": "<think>\nI add.\n</think>\n\nIt is 3.",
    "deepseek_r1": "\nI add.\n</think>\n\nIt is 3.",
    "mistral": "[THINK]I add.[/THINK]It is 3.",
    "command": "<|START_THINKING|>I add.<|END_THINKING|>It is 3.",
    "kimi": "◁think▷I add.◁/think▷It is 3.",
    "seed": "<seed:think>I add.</seed:think>It is 3.",
    "granite": "Here is my thought process: I add.\nHere is my response: It is 3.",
    "harmony": "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final"
    "<|message|>It is 3.<|return|>",
}


def make(name: str, prompt_end: str = "") -> ReasoningParser:
    cls = REASONING_PARSERS[name]
    tokenizer = ByteTokenizer.from_directory(Path())
    return cls(ReasoningParserContext(tokenizer=tokenizer, prompt_end=prompt_end))


def read(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    deltas = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    reasoning = "".join(delta.reasoning for delta in deltas)
    return reasoning, "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("name", EXAMPLES)
def test_reasoning_and_content_are_separated(name: str) -> None:
    reasoning, content = read(make(name), [EXAMPLES[name]])
    assert (reasoning.strip(), content) == ("I add.", "It is 3.")


def check_splits(name: str, num_splits: int) -> None:
    rng = random.Random(5)
    for text in (EXAMPLES[name], EXAMPLES[name][:15], "plain < text", ""):
        whole = read(make(name), [text])
        assert read(make(name), list(text)) == whole
        for _ in range(num_splits):
            at = rng.randint(0, len(text))
            assert read(make(name), [text[:at], text[at:]]) == whole


@pytest.mark.parametrize("name", EXAMPLES)
def test_random_pieces_give_the_same_result_as_the_whole_text(name: str) -> None:
    check_splits(name, 50)


@pytest.mark.soak
@pytest.mark.parametrize("name", EXAMPLES)
def test_two_thousand_random_splits_give_the_same_result(name: str) -> None:
    check_splits(name, 2000)


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {"deepseek_r1"}))
def test_text_without_markers_is_content(name: str) -> None:
    assert read(make(name), ["  It is 3."]) == ("", "  It is 3.")


def test_reasoning_that_the_prompt_opens_needs_no_start_marker() -> None:
    opened = make("think", prompt_end="<|im_start|>assistant\n<think>\n")
    assert read(opened, ["I add.</think>3"]) == ("I add.", "3")
    closed = make("think", prompt_end="<think>\n\n</think>\n\n")
    assert read(closed, ["3"]) == ("", "3")


def test_harmony_tool_calls_remain_in_the_content() -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    text = f"<|channel|>analysis<|message|>I call.<|end|><|start|>assistant{call}"
    assert read(make("harmony"), [text]) == ("I call.", "<|start|>assistant" + call)


def test_every_reasoning_format_has_an_example() -> None:
    assert set(REASONING_PARSERS) == set(EXAMPLES)
