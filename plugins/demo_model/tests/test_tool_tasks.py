"""Tests of the tasks with functions: questions, calls, held-out values, training data, template."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest

from dovetail_demo_model.functions import DECOYS, FUNCTIONS, weekday_of
from dovetail_demo_model.tasks import TASKS
from dovetail_demo_model.tool_tasks import (
    FAILED,
    NO_FUNCTION,
    TOOL_TASKS,
    draw_call,
    draw_missing,
    draw_offers,
    held_out_tool_questions,
    parse_call,
    write_call,
)

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TRAINING = Path(__file__).parents[1] / "training"
WEIGHTS = dict.fromkeys(TASKS, 1.0)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 27, "b": 58}}\n</tool_call>'


@pytest.fixture(scope="module")
def training_modules():
    """Make the training scripts importable in this file and remove their modules afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TRAINING))
        yield
    for path in TRAINING.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def saved(training_modules, tmp_path_factory):
    """Train the tokenizer and save it. Return (tokenizers object, transformers object)."""
    from tokenizer import save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(2026)
    save_tokenizer(tokenizer, folder, 1024)
    return tokenizer, transformers.AutoTokenizer.from_pretrained(folder)


def _render(loaded, messages, tools):
    return loaded.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("name", TOOL_TASKS)
def test_a_tool_question_accepts_its_own_call_and_answer_and_rejects_others(name):
    for question in held_out_tool_questions(name, 40, seed=1):
        turn = question.turn
        assert question.check_answer(turn.answer)
        assert not question.check_answer("It is done.")
        if turn.name:
            assert question.check_call(write_call(turn.name, turn.arguments))
            assert not question.check_call(write_call("other", turn.arguments))
            assert not question.check_call(write_call(turn.name, {}))
        assert not question.check_call(turn.answer)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_correct_call_uses_the_names_of_an_offered_function(name):
    for question in held_out_tool_questions(f"call_{name}", 40, seed=2):
        offered = {tool["function"]["name"]: tool["function"] for tool in question.tools}
        schema = offered[question.turn.name]["parameters"]
        assert list(question.turn.arguments) == list(schema["properties"])
        kinds = {"string": str, "integer": int, "number": int}
        for key, value in question.turn.arguments.items():
            assert isinstance(value, kinds[schema["properties"][key]["type"]])


def test_answers_use_the_result_even_if_the_result_is_wrong():
    questions = held_out_tool_questions("call_add", 200, seed=3)
    invalid = failed = 0
    for question in questions:
        turn = question.turn
        if turn.answer == FAILED:
            failed += 1
            continue
        shown = json.loads(turn.result)
        shown = shown["result"] if isinstance(shown, dict) else shown
        assert turn.answer.endswith(f"= {shown}.")
        invalid += shown != sum(turn.arguments.values())
    assert 20 < invalid < 120
    assert 0 < failed < 40


def test_the_calendar_function_counts_days_forwards_and_backwards():
    assert weekday_of("2026-03-14", 0) == "Saturday"
    assert weekday_of("2026-03-14", 10) == "Tuesday"
    assert weekday_of("2026-03-01", -1) == "Saturday"
    with pytest.raises(ValueError, match="Invalid isoformat"):
        weekday_of("tomorrow", 1)


def test_a_question_is_declined_only_if_its_function_is_not_offered():
    rng = Random(4)
    for _ in range(200):
        offers = draw_offers(rng, ("multiply", "weekday"))
        turn = draw_missing(rng, offers, held_out=False)
        assert turn.answer == NO_FUNCTION
        assert not any(text in turn.prompt for text in ("*", "times", "ultiply", "product", "-"))


def test_a_question_without_useful_functions_offers_a_decoy():
    offers = draw_offers(Random(5), ())
    assert [offer.definition in DECOYS for offer in offers] == [True]


@pytest.mark.costly
def test_values_of_held_out_calls_are_not_sampled_for_training():
    rng = Random(6)
    for name in FUNCTIONS:
        held_out = {q.turn.prompt for q in held_out_tool_questions(f"call_{name}", 200, seed=2026)}
        offer = next(offer for offer in draw_offers(rng, (name,)) if offer.function)
        trained = {draw_call(rng, offer, held_out=False).prompt for _ in range(3000)}
        assert len(trained) > 500
        assert not trained & held_out


def test_sums_that_are_held_out_are_held_out_in_calls_too():
    for question in held_out_tool_questions("call_add", 100, seed=7):
        assert TASKS["sum"].is_held_out(question.turn.prompt)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain text",
        "<tool_call>\n{}\n</tool_call>",
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        '<tool_call>\n["add", {}]\n</tool_call>',
        "<tool_call>\n{not json}\n</tool_call>",
        CALL + "\n" + CALL,
        "Sure. " + CALL,
    ],
)
def test_a_text_other_than_a_single_call_is_not_parsed(text):
    assert parse_call(text) is None


def test_a_written_call_is_parsed_to_the_same_name_and_arguments():
    assert write_call("add", {"a": 27, "b": 58}) == CALL
    assert parse_call(f" {CALL}\n") == ("add", {"a": 27, "b": 58})


def test_training_conversations_with_functions_contain_calls_and_rejections_and_plain_answers(
    training_modules,
):
    from conversations import draw_conversation

    rng = Random(8)
    drawn = [draw_conversation(rng, WEIGHTS) for _ in range(3000)]
    with_tools = [item for item in drawn if item.tools]
    turns = [turn for with_tool in with_tools for turn in with_tool.turns]
    assert 0.15 < len(with_tools) / len(drawn) < 0.3
    assert sum(len(turn) == 4 for turn in turns) > 0.4 * len(turns)
    assert sum(turn[-1] == NO_FUNCTION for turn in turns) > 0.1 * len(turns)
    assert not any(len(turn) == 4 for item in drawn if not item.tools for turn in item.turns)


@pytest.mark.costly
def test_the_tags_of_a_call_are_tokens_that_the_decoded_text_keeps(saved):
    tokenizer, loaded = saved
    ids = tokenizer.encode(CALL, add_special_tokens=False).ids
    assert [tokenizer.id_to_token(ids[0]), tokenizer.id_to_token(ids[-1])] == [
        "<tool_call>",
        "</tool_call>",
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == CALL
    assert loaded.decode(ids, skip_special_tokens=True) == CALL
    assert tokenizer.get_vocab_size() == 2048


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_template_with_functions_gives_the_token_ids_of_the_training_data(system, saved):
    from conversations import Conversation
    from tokenizer import ConversationEncoder

    tokenizer, loaded = saved
    turns = (("What is 27 + 58?", CALL, "85", "27 + 58 = 85."), ("Spell cow.", "cow: c o w."))
    conversation = Conversation(system=system, turns=turns, tools=(ADD,))
    call = {"id": "call_1", "type": "function", "function": json.loads(CALL[12:-13])}
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": "What is 27 + 58?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "85"},
        {"role": "assistant", "content": "27 + 58 = 85."},
        {"role": "user", "content": "Spell cow."},
    ]
    text = _render(loaded, messages, [ADD])
    head = f"{system}\n" if system else ""
    assert text == (
        f"<|bos|><|system|>{head}<tools>\nadd(a: integer, b: integer)\n</tools><|end|>"
        f"<|user|>What is 27 + 58?<|end|><|assistant|>{CALL}<|eos|>"
        "<|tool|><tool_response>\n85\n</tool_response><|end|><|assistant|>27 + 58 = 85.<|eos|>"
        "<|user|>Spell cow.<|end|><|assistant|>"
    )
    ids, mask = ConversationEncoder(tokenizer).encode(conversation)
    rendered = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[: len(rendered)] == rendered
    learned = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert learned == f"{CALL}27 + 58 = 85.cow: c o w."


def test_the_template_accepts_several_calls_whose_arguments_are_json_strings(
    saved,
):
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {"type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Wait.", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": 12},
    ]
    text = _render(saved[1], messages, [ADD, NOW])
    assert "<tools>\nadd(a: integer, b: integer)\nnow()\n</tools>" in text
    assert text.endswith(
        '<|assistant|>Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|eos|>'
        "<|tool|><tool_response>\n3\n</tool_response><|end|>"
        "<|tool|><tool_response>\n12\n</tool_response><|end|><|assistant|>"
    )


def test_the_template_shows_the_marks_of_the_hermes_format(saved):
    template = saved[1].chat_template
    assert all(mark in template for mark in ("<tool_call>", '"name"', '"arguments"'))


def test_the_engine_renders_the_template_like_transformers(saved):
    from tokenizer import CHAT_TEMPLATE

    from dovetail.tokenizers.template_renderer import TemplateRenderer

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 27 + 58?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 27, "b": 58}}}],
        },
        {"role": "tool", "content": "85"},
    ]
    variables = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_generation_prompt": True}
    for tools in ([ADD, NOW], None):
        ours = TemplateRenderer().render(CHAT_TEMPLATE, messages, {**variables, "tools": tools})
        assert ours == _render(saved[1], messages, tools)
