"""Messages, with Anthropic's client: events, tools, thinking, formats, token counts and errors."""

import json

import anthropic
import jsonschema
import pytest

pytestmark = pytest.mark.costly  # the tests share servers

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9999}, "b": {"enum": [1, 2, 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}
TEXT = "reverse: robot, bank, window"
MESSAGES = [{"role": "user", "content": TEXT}]
KEY = "key-of-anna"
THINKING = {"type": "enabled", "budget_tokens": 5}


def client_of(server, key):
    address = f"http://{server.host}:{server.port}"
    return anthropic.Anthropic(base_url=address, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    with client_of(server, "any") as created:
        yield created


@pytest.fixture(scope="module")
def keyed_server(serving):
    """A server with a key, and a model that reasons from its first token."""
    parsers = ("--tool-parser", "hermes", "--reasoning-parser", "deepseek_r1")
    options = ("--model", "demo", "--max-model-len", "512", "--api-key", KEY)
    with serving(*options, *parsers) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def thinking(keyed_server):
    with client_of(keyed_server, KEY) as created:
        yield created


def create(client, messages=MESSAGES, **fields):
    kwargs = {"model": "demo", "max_tokens": 8, "extra_body": {"temperature": 0}}
    return client.messages.create(messages=messages, **(kwargs | fields))


def test_a_message_has_the_same_text_as_a_chat_completion(server, client):
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]
    message = create(client, system=system)
    chat = [{"role": "system", "content": "Be short."}, *MESSAGES]
    body = server.chat(messages=chat).json
    assert message.content[0].text == body["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 8
    num_prompt = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert num_prompt == body["usage"]["prompt_tokens"]
    count = client.messages.count_tokens(model="demo", messages=MESSAGES, system=system)
    assert count.input_tokens == num_prompt


def test_a_stream_has_the_exact_sequence_of_events(client):
    whole = create(client)
    events = list(create(client, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    num_deltas = kinds.count("content_block_delta")
    assert num_deltas > 0
    end = ["content_block_stop", "message_delta", "message_stop"]
    deltas = ["content_block_delta"] * num_deltas
    assert kinds == ["message_start", "content_block_start", *deltas, *end]
    with client.messages.stream(
        model="demo", max_tokens=8, messages=MESSAGES, extra_body={"temperature": 0}
    ) as stream:
        message = stream.get_final_message()
    assert message.content[0].text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == 8


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_sequence_ends_the_message_and_is_named(client, streamed):
    text = create(client, max_tokens=32).content[0].text
    stop = text[6:9]
    kwargs = {"stop_sequences": [stop], "max_tokens": 32, "stream": streamed}
    message = create(client, **kwargs)
    end = next(e.delta for e in message if e.type == "message_delta") if streamed else message
    assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", stop)
    if not streamed:
        assert message.content[0].text == text[: text.index(stop)]


def test_tools_are_called_and_their_results_are_used(thinking):
    fields = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200}
    fields["thinking"] = THINKING
    message = create(thinking, **fields)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert (call.type, call.name) == ("tool_use", "add")
    jsonschema.validate(call.input, SCHEMA)
    pieces = list(create(thinking, stream=True, **fields))
    deltas = [event.delta for event in pieces if event.type == "content_block_delta"]
    arguments = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert json.loads("".join(arguments)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5555"}
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": [block.to_dict() for block in message.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    fields |= {"tool_choice": {"type": "none"}, "max_tokens": 8}
    answer = create(thinking, conversation, **fields)
    assert answer.usage.input_tokens > message.usage.input_tokens
    longer = [*conversation[:2], {"role": "user", "content": [{**result, "content": "5" * 50}]}]
    counts = [
        thinking.messages.count_tokens(model="demo", messages=messages, tools=[TOOL]).input_tokens
        for messages in (MESSAGES, conversation, longer)
    ]
    assert counts[0] < counts[1] < counts[2]


def test_thinking_is_a_block_before_the_text(thinking):
    message = create(thinking, thinking=THINKING, max_tokens=24)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking
    events = list(create(thinking, thinking=THINKING, max_tokens=24, stream=True))
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    pieces = [delta.thinking for delta in deltas if delta.type == "thinking_delta"]
    assert "".join(pieces) == message.content[0].thinking
    hidden = create(thinking, thinking={**THINKING, "display": "omitted"}, max_tokens=24)
    assert [block.type for block in hidden.content] == ["text"]


def test_the_text_matches_the_json_schema(client):
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = create(client, max_tokens=200, output_config=output)
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)


def test_the_error_for_a_wrong_key_has_the_format_of_the_api(keyed_server):
    with (
        client_of(keyed_server, "wrong-key") as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        create(client)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": 5}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "owner", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_the_error_for_an_invalid_field_names_it(server, fields, param):
    reply = server.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 8} | fields)
    assert reply.status == 400, reply.content
    assert reply.json["type"] == "error"
    assert reply.error["type"] == "invalid_request_error"
    if param is not None:
        assert reply.error["param"] == param, reply.error


def test_an_unknown_version_of_the_api_is_rejected(server):
    body = {"messages": MESSAGES, "max_tokens": 8}
    headers = {"anthropic-version": "1999-01-01"}
    assert server.post("/v1/messages", body, **headers).error["param"] == "anthropic-version"
