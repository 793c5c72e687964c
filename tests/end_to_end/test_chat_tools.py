"""Tools and reasoning with `LLM.chat`, in every process layout and at both pipeline depths."""

import json

import pytest

from dovetail import LLM, SamplingParams, StructuredOutputsParams
from dovetail.errors import RequestError

MESSAGES = [{"role": "user", "content": "What is 1234 + 4321?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9999}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("add", "weekday")
]
GREEDY = SamplingParams(temperature=0, max_tokens=100)
LAYOUTS = {
    "depth 1": {"async_scheduling": False},
    "depth 2": {"async_scheduling": True},
    "engine process": {"engine_process": True},
}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=list(LAYOUTS))
def llm(request):
    options = {"tool_parser": "hermes", "max_model_len": 512, **request.param}
    with LLM("demo", **options) as first:
        yield first


def chat(llm, params=GREEDY, messages=MESSAGES, **options):
    outputs = llm.chat(messages, params, use_tqdm=False, **options)
    return [item for output in outputs for item in output.outputs]


def check(message):
    assert message.tool_calls and message.content is None
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        assert arguments.keys() == {"a", "b"} and type(arguments["b"]) is bool


@pytest.mark.costly
def test_a_required_tool_call_is_valid(llm):
    sampled = SamplingParams(temperature=1.5, max_tokens=100, n=3, seed=1)
    for item in [*chat(llm, tools=TOOLS, tool_choice="required"), *chat(llm, sampled, tools=TOOLS)]:
        assert item.text and item.message is not None
    for item in chat(llm, sampled, tools=TOOLS, tool_choice="required"):
        if item.finish_reason == "stop":
            check(item.message)


def test_a_named_function_is_called_once(llm):
    named = {"type": "function", "function": {"name": "weekday"}}
    (first,) = chat(llm, tools=TOOLS, tool_choice=named)
    check(first.message)
    assert [call.name for call in first.message.tool_calls] == ["weekday"]


def test_without_tools_the_message_is_the_text(llm):
    (first,) = chat(llm)
    assert first.message.content == first.text and not first.message.tool_calls


def test_conversations_with_and_without_tool_calls_run_in_one_batch(llm):
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    result = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "5555"},
    ]
    plain, after = chat(llm, messages=[MESSAGES, result])
    assert plain.message.content and after.message is not None


def test_the_error_for_an_invalid_tool_or_result_names_it(llm):
    for options, parameter in (
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id"),
    ):
        with pytest.raises(RequestError) as error:
            chat(llm, **options)
        assert error.value.parameter == parameter
    outputs = llm.chat(
        [MESSAGES, [{"role": "tool", "content": "3"}]], GREEDY, use_tqdm=False, on_error="return"
    )
    assert outputs[0].outputs[0].message.content and "tool_call_id" in outputs[1].error


def test_a_grammar_applies_after_the_reasoning():
    options = {"reasoning_parser": "deepseek_r1", "max_model_len": 512}
    params = SamplingParams(
        temperature=0, max_tokens=200, structured_outputs=StructuredOutputsParams(regex="[ab]{4}")
    )
    with LLM("demo", **options) as llm:
        markers = llm.llm_engine.front.parsers.markers("")
        assert markers is not None and markers.end == "</think>"
        (first,) = chat(llm, params)
        if "</think>" in first.text:
            assert set(first.message.content) <= {"a", "b"}
        assert first.message.reasoning


@pytest.mark.costly
def test_another_grammar_plugin_forces_valid_calls_and_formats():
    pytest.importorskip("xgrammar", reason="the optional library xgrammar is not installed")
    options = {"tool_parser": "hermes", "grammar_backend": "xgrammar", "max_model_len": 512}
    with LLM("demo", **options) as llm:
        sampled = SamplingParams(temperature=1.5, max_tokens=200, n=4, seed=1)
        ended = [
            item
            for item in chat(llm, sampled, tools=TOOLS, tool_choice="required")
            if item.finish_reason == "stop"
        ]
        assert ended
        for params in ended:
            check(params.message)
        choice = StructuredOutputsParams(choice=["left", "right"])
        (params,) = chat(llm, SamplingParams(max_tokens=20, structured_outputs=choice))
        assert params.text in ("left", "right")
        (free,) = chat(llm)
        assert free.message.content
