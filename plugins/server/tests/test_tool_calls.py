"""Tools, tool calls and reasoning over HTTP, streamed and not streamed, next to other requests."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

pytestmark = pytest.mark.costly  # the tests share servers

MODEL = ("--model", "demo", "--max-model-len", "512")
QUESTION = [{"role": "user", "content": "What is 1234 + 4321?"}]
PROPERTIES = {"a": {"type": "integer", "maximum": 9999}, "b": {"enum": [1, 2, 3]}}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["a", "b"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 1000}, "minItems": 40}
LONG = {"type": "object", "properties": {"a": NUMBERS}, "required": ["a"]}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name, schema=SCHEMA):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add"), tool("now", NO_ARGUMENTS)]
SCHEMAS = {"add": SCHEMA, "now": NO_ARGUMENTS}
NAMED = {"type": "function", "function": {"name": "add"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def tools_server(serving):
    options = ("--tool-parser", "hermes", "--reasoning-parser", "none")
    with serving(*MODEL, *options) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def thinking_server(serving):
    """A server whose model reasons from its first token until "</think>"."""
    options = ("--tool-parser", "hermes", "--reasoning-parser", "deepseek_r1")
    with serving(*MODEL, *options) as server:
        yield server.wait_until_ready()


def ask(server, **body):
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 120} | body
    return server.post("/v1/chat/completions", body)


def choice_of(server, **body):
    reply = ask(server, **body)
    assert reply.status == 200, reply.content[:500]
    (choice,) = reply.json["choices"]
    return choice


def joined(reply):
    """Return the message and the finish reason in the events of a stream."""
    message, finish = {"content": "", "reasoning": "", "tool_calls": []}, None
    assert reply.events[-1] == "[DONE]"
    for event in reply.events[:-1]:
        (choice,) = event["choices"]
        delta, finish = choice["delta"], choice["finish_reason"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(message["tool_calls"])
                message["tool_calls"].append([piece["function"]["name"], ""])
            message["tool_calls"][piece["index"]][1] += piece["function"]["arguments"]
    return message, finish


def calls_of(choice):
    collected = choice["message"].get("tool_calls", [])
    assert len({item["id"] for item in collected}) == len(collected)
    return [[item["function"]["name"], item["function"]["arguments"]] for item in collected]


def check_calls(choice):
    calls = calls_of(choice)
    assert calls and choice["finish_reason"] == "tool_calls"
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return calls


@pytest.mark.sampled(8)
@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("tool_choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_tool_call_is_valid_with_and_without_streaming(
    tools_server, tool_choice, temperature
):
    body = {"tools": TOOLS, "tool_choice": tool_choice, "temperature": temperature, "seed": 7}
    choice = choice_of(tools_server, **body)
    calls = check_calls(choice)
    assert choice["message"]["content"] is None
    if tool_choice is NAMED:
        assert [name for name, _ in calls] == ["add"]
    message, finish = joined(ask(tools_server, stream=True, **body))
    assert (message["tool_calls"], message["content"], finish) == (calls, "", "tool_calls")


def test_without_parallel_tool_calls_a_message_has_one_tool_call(tools_server):
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(4):
        choice = choice_of(tools_server, temperature=1.5, seed=seed, **body)
        assert len(check_calls(choice)) == 1


def test_several_completions_have_their_own_tool_calls(tools_server):
    reply = ask(tools_server, tools=TOOLS, tool_choice="required", n=3, temperature=1, seed=3)
    content = [check_calls(choice) for choice in reply.json["choices"]]
    assert len(content) == 3


def test_arguments_are_streamed_as_they_are_generated(tools_server):
    # A call of a few tokens takes less time than a time slice of another process on a busy machine,
    # and its tokens are then sent in one event.
    tools = [tool("add", LONG)]

    def num_pieces():
        reply = ask(tools_server, tools=tools, tool_choice=NAMED, stream=True, max_tokens=200)
        choices = [event["choices"] for event in reply.events[:-1]]
        return sum(any("tool_calls" in choice["delta"] for choice in each) for each in choices)

    assert any(num_pieces() > 3 for _ in range(10))


def test_a_truncated_tool_call_has_the_finish_reason_length(tools_server):
    body = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 24}
    choice = choice_of(tools_server, **body)
    assert choice["finish_reason"] == "length"
    message, finish = joined(ask(tools_server, stream=True, **body))
    assert (message["tool_calls"], finish) == (calls_of(choice), "length")


def test_with_a_response_format_the_message_is_a_valid_tool_call_or_matches_the_format(
    tools_server,
):
    for seed in range(4):
        body = {"tools": TOOLS, "response_format": FORMAT, "temperature": 1.5, "seed": seed}
        choice = choice_of(tools_server, **body)
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        elif choice["finish_reason"] == "tool_calls":
            assert len(check_calls(choice)) == 1


def test_the_tokenize_route_counts_the_tokens_of_the_tools(tools_server):
    messages = [{"role": "user", "content": "What is 7 + 8?"}]
    counts = [
        tools_server.post("/tokenize", {"messages": messages, **more}).json["count"]
        for more in ({}, {"tools": []}, {"tools": TOOLS})
    ]
    usage = ask(tools_server, messages=messages, tools=TOOLS).json["usage"]
    assert counts[0] == counts[1] < counts[2] == usage["prompt_tokens"]
    invalid = tools_server.post("/tokenize", {"messages": messages, "tools": [{"type": "x"}]})
    assert invalid.status == 400 and invalid.json["error"]["param"].startswith("tools")


def test_tool_choice_none_gives_the_same_message_as_no_tools(tools_server):
    without = choice_of(tools_server)["message"]
    assert choice_of(tools_server, tools=TOOLS, tool_choice="none")["message"] == without
    assert choice_of(tools_server, tools=[])["message"] == without


def test_requests_concurrent_with_forced_tool_calls_get_the_same_text_as_alone(tools_server):
    alone = choice_of(tools_server, max_tokens=24)["message"]["content"]
    forced = {"tools": TOOLS, "tool_choice": "required", "temperature": 1}
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(choice_of, tools_server, seed=seed, **forced) for seed in range(6)]
        free = [pool.submit(choice_of, tools_server, max_tokens=24) for _ in range(6)]
        assert {item.result()["message"]["content"] for item in free} == {alone}
        for call in calls:
            check_calls(call.result())


def test_log_probabilities_of_a_tool_call_are_returned(tools_server):
    body = {"tools": TOOLS, "tool_choice": NAMED, "logprobs": True}
    choice = choice_of(tools_server, **body)
    events = ask(tools_server, stream=True, **body).events[:-1]
    streamed = [
        entry
        for event in events
        for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert [item["token"] for item in streamed] == [
        item["token"] for item in choice["logprobs"]["content"]
    ]


def test_a_tool_result_is_read_and_a_result_of_an_unknown_tool_call_is_rejected(tools_server):
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "5555"}
    assert choice_of(tools_server, tools=TOOLS, messages=[*QUESTION, called, result])
    reply = ask(tools_server, messages=[*QUESTION, called, {**result, "tool_call_id": "c2"}])
    assert reply.status == 400 and reply.error["param"] == "messages[2].tool_call_id"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "add"}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("a", {"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"thinking_budget": 3}, "thinking_budget"),
        ({"thinking_budget": "3"}, "thinking_budget"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"tools": TOOLS, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"tools": [tool("a", {"$ref": "http://127.0.0.1/x"})]}, "tools"),
        ({"tools": [tool("a", {"properties": {"b": {"pattern": "(("}}})]}, "tools"),
        ({"tools": [tool("a", {"properties": {"b": {"uniqueItems": True}}})]}, "tools"),
    ],
)
def test_the_error_for_an_invalid_tool_field_names_it(tools_server, body, param):
    reply = ask(tools_server, **body)
    assert reply.status == 400, reply.content[:300]
    assert reply.error["param"] == param, reply.error


def test_tools_need_a_parser_for_the_format_of_the_model(serving):
    with serving(*MODEL, "--tool-parser", "none") as server:
        server.wait_until_ready()
        reply = ask(server, tools=TOOLS)
        assert reply.status == 400 and reply.error["param"] == "tools"
        assert "tool parser" in reply.error["message"]


def test_a_thinking_budget_ends_the_reasoning_and_the_answer_follows(thinking_server):
    body = {"thinking_budget": 6, "max_tokens": 40}
    choice = choice_of(thinking_server, **body)
    message = choice["message"]
    assert message["reasoning"] and message["reasoning"] == message["reasoning_content"]
    assert message["content"] and "think>" not in message["content"] + message["reasoning"]
    streamed, _ = joined(ask(thinking_server, stream=True, **body))
    assert streamed["reasoning"] == message["reasoning"]
    assert streamed["content"] == message["content"]
    hidden = choice_of(thinking_server, include_reasoning=False, **body)["message"]
    assert "reasoning" not in hidden and hidden["content"] == message["content"]


def test_a_grammar_and_a_forced_tool_call_follow_the_reasoning(thinking_server):
    body = {"thinking_budget": 6, "tools": TOOLS, "tool_choice": "required"}
    choice = choice_of(thinking_server, **body)
    assert choice["message"]["reasoning"] and check_calls(choice)
    choice = choice_of(thinking_server, thinking_budget=6, response_format=FORMAT)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert choice["message"]["reasoning"] and choice["finish_reason"] == "stop"
