"""The tools of a request: checks, the grammar of the calls, and the history of a conversation."""

from __future__ import annotations

import gc
import json
from datetime import datetime
from typing import Any
from weakref import ref

import pytest

from dovetail import SamplingParams, StructuredOutputsParams
from dovetail.engine.messages.history import MAX_CALLS, CallForm, call_form, prepare_history
from dovetail.engine.messages.tool_use import MAX_TOOLS, constrain, read_tools
from dovetail.errors import RequestError
from dovetail.interfaces import ReasoningMarkers, ToolParser
from dovetail.sampling_params import MAX_GRAMMAR_CHARS
from dovetail.tokenizers.chat_template import ChatTemplateEnvironment, render_chat_template
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.fakes.tool_parser import FakeToolParser

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MARKERS = ReasoningMarkers(start="<why>", end="</why>")


def tool(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


TOOLS = [tool("add"), tool("weekday")]
NAMED = {"type": "function", "function": {"name": "weekday"}}


class WithoutCallText(FakeToolParser):
    @classmethod
    def call_text(cls, name: str) -> None:
        return None


class WithoutTrigger(FakeToolParser):
    @classmethod
    def call_text(cls, name: str) -> Any:
        text = super().call_text(name)
        return type(text)(begin=text.begin, end=text.end, separator=None)


def constrained(
    *,
    tools: Any = None,
    parallel: bool = True,
    parser_cls: type[ToolParser] | None = FakeToolParser,
    markers: ReasoningMarkers | None = None,
    has_grammar: bool = True,
    answer: StructuredOutputsParams | None = None,
    **options: Any,
) -> SamplingParams:
    return constrain(
        SamplingParams(structured_outputs=answer),
        read_tools(TOOLS if tools is None else tools, options.get("choice"), parallel),
        parser_cls=parser_cls,
        markers=markers,
        has_grammar=has_grammar,
        thinking_budget=options.get("budget"),
    )


def tag_of(params: SamplingParams) -> dict[str, Any]:
    assert params.structured_outputs is not None
    assert params.structured_outputs.form == "structural_tag"
    tag: dict[str, Any] = json.loads(params.structured_outputs.text)
    return tag


def begins(tag: dict[str, Any]) -> list[str]:
    return [item["begin"] for item in tag["structures"]]


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ("add", None, "tools"),
        ([1], None, "tools[0]"),
        ([{"type": "retrieval"}], None, "tools[0]"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool(), tool("a b")], None, "tools[1].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool(), tool()], None, "tools[1].function.name"),
        ([tool(description=3)], None, "tools[0].function.description"),
        ([tool(description="x" * 70_000)], None, "tools[0].function.description"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], None, "tools[0].function.parameters.type"),
        ([tool(parameters={"pattern": "(("})], None, "tools[0].function.parameters.type"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], None, "tools"),
        (None, "required", "tool_choice"),
        ([], NAMED, "tool_choice"),
        (TOOLS, "any", "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "sub"}}, "tool_choice"),
    ],
)
def test_the_error_for_an_invalid_tool_or_tool_choice_names_it(
    tools: Any, choice: Any, field: str
) -> None:
    with pytest.raises(RequestError) as error:
        read_tools(tools, choice)
    assert error.value.parameter == field


def test_parallel_tool_calls_must_be_a_boolean() -> None:
    with pytest.raises(RequestError, match="parallel_tool_calls"):
        read_tools(TOOLS, None, "yes")


def test_a_required_tool_call_calls_any_function_and_has_no_other_text() -> None:
    tag = tag_of(constrained(choice="required"))
    assert begins(tag) == ["<call>add ", "<call>weekday "]
    assert tag["at_least_one"] and tag["separator"] == "" and "triggers" not in tag
    assert [item["schema"] for item in tag["structures"]] == [SCHEMA, SCHEMA]


def test_without_parallel_tool_calls_a_required_call_ends_the_message() -> None:
    tag = tag_of(constrained(choice="required", parallel=False))
    assert tag["stop_after_first"] and "separator" not in tag


def test_a_named_function_is_the_only_possible_call() -> None:
    tag = tag_of(constrained(choice=NAMED))
    assert begins(tag) == ["<call>weekday "] and tag["stop_after_first"]


def test_with_tool_choice_auto_a_trigger_begins_a_constrained_call() -> None:
    tag = tag_of(constrained())
    assert tag["triggers"] == ["<call>"] and not tag.get("at_least_one")
    assert not tag["stop_after_first"]
    assert tag_of(constrained(parallel=False))["stop_after_first"]


def test_with_tool_choice_auto_a_call_format_without_a_trigger_is_not_constrained() -> None:
    assert constrained(parser_cls=WithoutTrigger).structured_outputs is None
    assert constrained(parser_cls=WithoutCallText).structured_outputs is None
    assert constrained(has_grammar=False).structured_outputs is None


def test_with_tool_choice_auto_a_request_that_ignores_eos_is_not_constrained() -> None:
    params = constrain(
        SamplingParams(ignore_eos=True),
        read_tools(TOOLS),
        parser_cls=FakeToolParser,
        markers=None,
        has_grammar=True,
    )
    assert params.structured_outputs is None


def test_a_function_without_parameters_accepts_any_json_object() -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    tag = tag_of(constrained(tools=[bare], choice="required"))
    assert tag["structures"][0]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("response", "structure"),
    [
        (StructuredOutputsParams(json=SCHEMA), {"schema": SCHEMA}),
        (StructuredOutputsParams(json_object=True), {"schema": {"type": "object"}}),
        (StructuredOutputsParams(regex="[ab]"), {"regex": "[ab]"}),
        (StructuredOutputsParams(choice=["a.", "b"]), {"regex": "a\\.|b"}),
    ],
)
def test_with_tool_choice_auto_the_message_is_a_tool_call_or_matches_the_response_format(
    response: StructuredOutputsParams, structure: dict[str, Any]
) -> None:
    tag = tag_of(constrained(answer=response))
    assert tag["structures"][-1] == {"begin": "", **structure}
    assert tag["at_least_one"] and tag["stop_after_first"]


def test_a_required_tool_call_excludes_the_response_format() -> None:
    response = StructuredOutputsParams(json=SCHEMA)
    assert len(tag_of(constrained(answer=response, choice="required"))["structures"]) == 2


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"parser_cls": None}, "tools"),
        ({"parser_cls": WithoutCallText, "choice": "required"}, "tool_choice"),
        ({"has_grammar": False, "choice": NAMED}, "tool_choice"),
        ({"budget": 5}, "thinking_budget"),
        (
            {"answer": StructuredOutputsParams(structural_tag={"structures": []})},
            "structured_outputs",
        ),
    ],
)
def test_the_error_for_an_unsupported_tool_feature_names_it(
    kwargs: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as error:
        constrained(**kwargs)
    assert error.value.parameter == field


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "answer",
    [
        {"json": "{bad"},
        {"json": DEEP},
        {"json": '{"maximum": 1' + "0" * 5000 + "}"},
        {"json": '{"title": "\\ud800"}'},
        {"json": "5"},
        {"form": "choice", "text": "5"},
        {"form": "choice", "text": "[5]"},
        {"form": "choice", "text": "{"},
        {"json": '{"title": "' + "x" * (MAX_GRAMMAR_CHARS - 20) + '"}'},
    ],
)
@pytest.mark.parametrize("tools", [None, []])
def test_a_grammar_that_is_not_valid_json_is_rejected(answer: dict[str, str], tools: Any) -> None:
    markers = ReasoningMarkers(end="<|end|>", answer="<|final|>")
    grammar = StructuredOutputsParams(**answer)
    with pytest.raises(RequestError) as error:
        constrained(tools=tools, markers=markers, answer=grammar)
    assert error.value.parameter in ("structured_outputs", "tools")


def test_the_error_for_tools_that_are_too_large_for_a_grammar_names_them() -> None:
    large = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(15_000)}}
    with pytest.raises(RequestError, match="the grammar of tools cannot be used") as error:
        constrained(tools=[tool(parameters=large)], choice="required")
    assert error.value.parameter == "tools"


def test_without_tools_the_sampling_parameters_are_unchanged() -> None:
    for arguments in ({"tools": []}, {"choice": "none"}, {"tools": [], "markers": MARKERS}):
        params = constrained(**arguments)
        assert params.structured_outputs is None and params.reasoning is None


def test_a_grammar_applies_after_the_reasoning() -> None:
    params = constrained(choice="required", markers=MARKERS)
    assert params.reasoning is not None
    assert (params.reasoning.start, params.reasoning.end) == ("<why>", "</why>")
    limited = constrained(tools=[], markers=MARKERS, budget=7)
    assert limited.reasoning is not None and limited.reasoning.budget == 7


def test_the_response_format_applies_after_the_marker_that_begins_the_answer() -> None:
    markers = ReasoningMarkers(end="<|end|>", answer="<|final|>")
    params = constrained(tools=[], markers=markers, answer=StructuredOutputsParams(regex="a"))
    assert tag_of(params)["structures"] == [{"begin": "<|final|>", "regex": "a"}]


# --- history ------------------------------------------------------------------------------------


def call(arguments: Any = '{"a": 1}', **fields: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function, **fields}


def assistant(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def test_tool_call_arguments_become_objects_for_the_template() -> None:
    values = [assistant(call(), call("no JSON"), call("[1]"), call(""), call({"a": 2})), RESULT]
    messages = prepare_history(values)
    shown = [item["function"]["arguments"] for item in messages[0]["tool_calls"]]
    assert shown == [{"a": 1}, "no JSON", "[1]", {}, {"a": 2}]
    assert values[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_tool_call_arguments_remain_strings_for_a_template_that_expects_strings() -> None:
    form = CallForm(with_objects=False, content=None)
    (message,) = prepare_history(
        [{**assistant(call({"a": 2}), call('{"a": 1}')), "content": ""}], form
    )
    shown = [item["function"]["arguments"] for item in message["tool_calls"]]
    assert shown == ['{"a": 2}', '{"a": 1}'] and message["content"] is None


class TemplateTokenizer(ByteTokenizer):
    """Renders chat templates in this process."""

    def apply_chat_template(
        self, messages: Any, *, chat_template: str | None = None, **variables: Any
    ) -> str:
        environment = ChatTemplateEnvironment(datetime.now)
        template = environment.compile_template(chat_template or "")
        return render_chat_template(template, messages, variables)


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("call_text", "form"),
    [
        ("{{ c.function.name }}{{ c.function.arguments | tojson }}", CallForm()),
        (
            "{{ c.function.name ~ (m.content is none and c.function.arguments | tojson) }}",
            CallForm(content=None),
        ),
        (
            "{{ m.content + c.function.name + c.function.arguments }}",
            CallForm(with_objects=False, content=""),
        ),
        (
            "{% if m.content is none %}{{ c.function.name + c.function.arguments }}{% endif %}",
            CallForm(with_objects=False, content=None),
        ),
        (
            "{% for k, v in c.function.arguments | items %}{{ c.function.name + v }}{% endfor %}",
            None,
        ),
        ("{{ raise_exception('no calls') }}", None),
    ],
)
def test_rendering_a_template_detects_the_form_of_tool_calls_that_it_expects(
    call_text: str, form: CallForm | None
) -> None:
    template = CALLS.replace("CALL", call_text)
    assert call_form(TemplateTokenizer(), template) == (form or CallForm())


def test_a_tokenizer_whose_form_of_tool_calls_is_known_is_freed() -> None:
    """Otherwise the tokenizers of engines that are shut down stay in memory."""
    tokenizer = TemplateTokenizer()
    for number in range(40):
        assert call_form(tokenizer, f"{number}") == CallForm()
    alive = ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


def test_an_empty_list_of_tool_calls_is_omitted() -> None:
    assert prepare_history([{**assistant(), "content": "a"}]) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([RESULT], "messages[0].tool_call_id"),
        ([assistant(call()), {**RESULT, "tool_call_id": "c2"}], "messages[1].tool_call_id"),
        ([assistant(call()), {**RESULT, "tool_call_id": None}], "messages[1].tool_call_id"),
        ([assistant(call()), {"role": "tool", "content": ""}], "messages[1].tool_call_id"),
        ([{**assistant(), "tool_calls": "add"}], "messages[0].tool_calls"),
        ([assistant(*[call()] * (MAX_CALLS + 1))], "messages[0].tool_calls"),
        ([assistant(1)], "messages[0].tool_calls[0]"),
        ([assistant({"id": "c1"})], "messages[0].tool_calls[0]"),
        ([assistant(call(), {"function": {}})], "messages[0].tool_calls[1].function.name"),
        ([assistant(call(id=3))], "messages[0].tool_calls[0].id"),
        ([assistant(call([1]))], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_the_error_for_an_invalid_message_history_names_the_field(
    messages: list[Any], field: str
) -> None:
    with pytest.raises(RequestError) as error:
        prepare_history(messages)
    assert error.value.parameter == field


def test_deeply_nested_tool_call_arguments_remain_a_string() -> None:
    (message,) = prepare_history([assistant(call(DEEP))])
    assert message["tool_calls"][0]["function"]["arguments"] == DEEP


def test_tool_call_arguments_that_json_cannot_represent_are_rejected() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for arguments in ({"a": b"bytes"}, {"a": 10**5000}, deep):
        with pytest.raises(RequestError, match="an object that JSON can represent") as error:
            prepare_history([assistant(call(arguments))], CallForm(with_objects=False))
        assert error.value.parameter == "messages[0].tool_calls[0].function.arguments"
