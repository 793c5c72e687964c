"""Every tool parser reads its published format, in whole texts and in random pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dovetail.interfaces import ToolDelta, ToolParser, ToolParserContext
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_parsers import TOOL_PARSERS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "clock")
]
ARGS = {"city": 'Zürich "old" }]', "days": 2}
JSON = json.dumps(ARGS, ensure_ascii=False)
PLAIN = {"city": "Bern", "days": 3}

EXAMPLES: dict[str, list[str]] = {
    "hermes": [
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
        f'<tool_call>\n{{"arguments": {JSON}, "name": "clock"}}\n</tool_call>'
    ],
    "granite": [
        f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}, '
        f'{{"name": "clock", "arguments": {JSON}}}]'
    ],
    "phi4_mini": [
        f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}, '
        f'{{"name": "clock", "arguments": {JSON}}}]<|/tool_call|>',
        f'functools[{{"name": "weather", "arguments": {JSON}}},'
        f'{{"name": "clock", "arguments": {JSON}}}]',
    ],
    "command_r": [
        f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "weather", "parameters": {JSON}}},'
        f'\n{{"tool_call_id": "1", "tool_name": "clock", "parameters": {JSON}}}\n]<|END_ACTION|>',
        f'Action: ```json\n[{{"tool_name": "weather", "parameters": {JSON}}},\n'
        f'{{"tool_name": "clock", "parameters": {JSON}}}]\n```',
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}, "id": "abcdefghi"}}, '
        f'{{"name": "clock", "arguments": {JSON}}}]',
        f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{JSON}",
        f"[TOOL_CALLS]weather{JSON}[TOOL_CALLS]clock{JSON}",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.clock:1"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>"
    ],
    "llama3_json": [
        f'{{"name": "weather", "parameters": {JSON}}}; {{"name": "clock", "parameters": {JSON}}}',
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {JSON}}};'
        f'{{"type": "function", "name": "clock", "parameters": {JSON}}}',
    ],
    "qwen3_xml": [
        "<tool_call>\n<function={}>\n<parameter=city>\n{}\n</parameter>\n<parameter=days>\n{}\n"
        "</parameter>\n</function>\n</tool_call>"
    ],
    "glm45": [
        "<tool_call>{}\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    ],
    "harmony": [
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
        "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>"
        f"{JSON}<|call|>"
    ],
    "pythonic": [
        '[weather(city="Zürich \\"old\\" }]", days=2), clock(city=\'Zürich "old" }]\', days=2)]'
    ],
}
for item in ("qwen3_xml", "glm45"):
    form = EXAMPLES[item][0]
    EXAMPLES[item] = [
        "\n".join(form.format(name, ARGS["city"], 2) for name in ("weather", "clock"))
    ]

CASES = [(name, text) for name, texts in EXAMPLES.items() for text in texts]
NO_CONTENT_BEFORE = ("llama3_json", "pythonic")
HOSTILE = [
    "",
    " ",
    "plain text",
    "<",
    "{",
    "[",
    "[]",
    '{"name": 1}',
    '{"name": "weather"',
    '{"name": "weather", "parameters": "x"}',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    "<tool_call>" * 50,
    "<|tool_call|>[",
    "functools[[[[",
    "[TOOL_CALLS]" + "x" * 5000,
    "<function=weather><parameter=",
    "<tool_call>weather\n<arg_key>city</arg_key>",
    "[weather(city=",
    "[weather(((((",
    "[" * 5000,
    "<|channel|>" + "a" * 2000,
    "<|channel|>final<|message|>Hello<|end|>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\nnone",
]


def make(name: str, tools: Any = TOOLS) -> ToolParser:
    cls = TOOL_PARSERS[name]
    return cls(ToolParserContext(tokenizer=ByteTokenizer.from_directory(Path()), tools=tools))


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the name and arguments of each tool call."""
    content, calls = "", []
    for delta in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        assert isinstance(delta, ToolDelta)
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.arguments)
    return content, calls


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, min(40, len(text)))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_two_tool_calls_are_read_with_their_arguments(name: str, text: str) -> None:
    content, calls = read(make(name), [text])
    assert [(item, json.loads(arguments)) for item, arguments in calls] == [
        ("weather", ARGS),
        ("clock", ARGS),
    ]
    assert content == ""


@pytest.mark.parametrize(("name", "text"), CASES)
def test_the_text_before_a_tool_call_is_content(name: str, text: str) -> None:
    if name in NO_CONTENT_BEFORE:
        assert read(make(name), ["Hello. " + text.removeprefix("<|python_tag|>")])[1] == []
        return
    content, calls = read(make(name), ["Hello. " + text + "\n"])
    assert content.strip() == "Hello."
    assert len(calls) == 2


def check_splits(name: str, text: str, num_splits: int) -> None:
    rng, whole = random.Random(7), read(make(name), [text])
    assert read(make(name), list(text)) == whole
    for _ in range(num_splits):
        pieces = split(text, rng)
        assert read(make(name), pieces) == whole, pieces


@pytest.mark.costly
@pytest.mark.parametrize(("name", "text"), CASES)
def test_random_pieces_give_the_same_tool_calls_as_the_whole_text(name: str, text: str) -> None:
    check_splits(name, text, 50)
    check_splits(name, "Hi <" + text + "\n\nend", 20)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "text"), CASES)
def test_two_thousand_random_splits_give_the_same_tool_calls(name: str, text: str) -> None:
    check_splits(name, text, 2000)


@pytest.mark.costly
@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_text_raises_an_error_however_it_is_split(name: str, text: str) -> None:
    whole = read(make(name), [text])
    assert read(make(name), list(text)) == whole
    if "channel" not in text and not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_prefix_of_a_tool_call_raises_no_error(name: str, text: str) -> None:
    for size in range(0, len(text), 7):
        whole = read(make(name), [text[:size]])
        assert read(make(name), list(text[:size])) == whole


@pytest.mark.parametrize(("name", "text"), CASES)
def test_calls_to_functions_that_are_not_offered_count_as_content(name: str, text: str) -> None:
    other = [{"type": "function", "function": {"name": "other"}}]
    content, calls = read(make(name, other), [text])
    assert calls == []
    assert "weather" in content or name == "harmony"


def test_arguments_arrive_before_the_tool_call_ends() -> None:
    parser = make("hermes")
    first = parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Ber')
    assert [(call.name, call.arguments) for call in first.calls] == [("weather", '{"city": "Ber')]
    assert parser.feed('n"}').calls[0].arguments == 'n"}'


def test_arguments_given_as_a_string_are_decoded() -> None:
    text = json.dumps({"name": "weather", "arguments": json.dumps(PLAIN)})
    _, calls = read(make("hermes"), [f"<tool_call>{text}</tool_call>"])
    assert json.loads(calls[0][1]) == PLAIN


def test_a_parameter_that_is_not_a_string_is_read_as_json() -> None:
    text = "<tool_call><function=weather><parameter=city>12</parameter><parameter=days>12"
    text += "</parameter></function></tool_call>"
    _, calls = read(make("qwen3_xml"), [text])
    assert json.loads(calls[0][1]) == {"city": "12", "days": 12}


@pytest.mark.costly
def test_a_long_argument_in_small_pieces_takes_linear_time() -> None:
    text = "[weather(city='" + "x" * 200_000 + "')]"
    _, calls = read(make("pythonic"), [text[i : i + 2] for i in range(0, len(text), 2)])
    assert len(calls[0][1]) > 200_000


def test_every_format_has_an_example() -> None:
    assert set(TOOL_PARSERS) == set(EXAMPLES)


SURROGATE = "\\ud800"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "clock", "arguments": "{SURROGATE}"}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": "{SURROGATE}", "name": "clock"}}</tool_call>'),
        ("mistral", f'[TOOL_CALLS][{{"name": "clock", "arguments": "{SURROGATE}"}}]'),
        ("pythonic", f'[clock(city="{SURROGATE}")]'),
        ("pythonic", f"[clock(city=['{SURROGATE}'])]"),
    ],
)
def test_arguments_of_a_model_never_contain_lone_surrogates(name: str, text: str) -> None:
    """They could not be sent to the client."""
    parser = TOOL_PARSERS[name](ToolParserContext(tokenizer=ByteTokenizer(), tools=TOOLS))
    deltas = [parser.feed(text), parser.finish()]
    arguments = "".join(call.arguments for delta in deltas for call in delta.calls)
    assert arguments.encode() and "".join(delta.content for delta in deltas) == ""
