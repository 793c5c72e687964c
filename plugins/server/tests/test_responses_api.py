"""Responses, with OpenAI's client: events, the store, tools, reasoning, formats and errors."""

import json
import threading
import time

import jsonschema
import openai
import pytest

pytestmark = pytest.mark.costly  # the tests share servers

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9999}, "b": {"enum": [1, 2, 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
FORMAT = {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}}
TEXT = "reverse: robot, bank, window"
STORED = 4
KEYS = ("key-of-anna", "key-of-ben")


def client_of(server, key="any"):
    address = f"http://{server.host}:{server.port}/v1"
    return openai.OpenAI(base_url=address, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as created:
        yield created


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def keyed_server(serving, folder):
    """A server with two keys, a small store, and a model that reasons from its first token."""
    keys = [part for key in KEYS for part in ("--api-key", key)]
    parsers = ("--tool-parser", "hermes", "--reasoning-parser", "deepseek_r1")
    limits = ("--max-stored-responses", str(STORED), "--storage-dir", str(folder))
    longer = json.dumps({"max_position_embeddings": 8192})
    model = ("--model", "demo", "--max-model-len", "8192", "--hf-overrides", longer)
    with serving(*model, *keys, *parsers, *limits) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def anna(keyed_server):
    with client_of(keyed_server, KEYS[0]) as created:
        yield created


@pytest.fixture(scope="module")
def ben(keyed_server):
    with client_of(keyed_server, KEYS[1]) as created:
        yield created


def create(client, text=TEXT, **fields):
    kwargs = {"model": "demo", "input": text, "temperature": 0, "max_output_tokens": 8}
    return client.responses.create(**(kwargs | fields))


def chat_text(server, messages):
    return server.chat(messages=messages).json["choices"][0]["message"]["content"]


def test_a_response_has_the_same_text_as_a_chat_completion(server, client):
    response = create(client, instructions="Be short.", metadata={"a": "b"})
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}]
    assert response.output_text == chat_text(server, messages)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == 8 + response.usage.input_tokens
    assert response.metadata == {"a": "b"} and response.instructions == "Be short."


def test_a_stream_has_the_exact_sequence_of_events(client):
    whole = create(client)
    events = list(create(client, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 0
    start = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*start, *["output_text.delta"] * num_deltas, *end]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    assert deltas == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.id == events[0].response.id
    assert events[-1].response.usage == whole.usage


def test_the_next_response_continues_the_conversation_of_the_previous_one(server, client):
    first = create(client, instructions="Only here.")
    second = create(client, "And now?", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    assert second.output_text == chat_text(server, messages)
    assert second.previous_response_id == first.id
    by_reference = [
        {"role": "user", "content": TEXT},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "And now?"},
    ]
    assert create(client, by_reference).output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in items] == [item["content"] for item in messages]
    (last,) = client.responses.input_items.list(second.id, limit=1).data
    assert last.content[0].text == "And now?"


def test_a_response_is_retrieved_and_deleted(client):
    response = create(client)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    assert client.responses.cancel(response.id).status == "incomplete"  # it has ended before
    client.responses.delete(response.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            use(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"
    unsaved = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unsaved.id)


def test_a_cancelled_response_ends_its_stream_and_is_stored(anna):
    kwargs = {"stream": True, "max_output_tokens": 8000, "extra_body": {"ignore_eos": True}}
    stream = create(anna, **kwargs)
    created = next(stream)
    cancelled = anna.responses.cancel(created.response.id)
    assert cancelled.status == "cancelled"
    assert list(stream)[-1].response.status == "cancelled"
    assert anna.responses.retrieve(created.response.id).status == "cancelled"


def test_a_client_that_disconnects_cancels_its_response(anna):
    kwargs = {"stream": True, "max_output_tokens": 8000, "extra_body": {"ignore_eos": True}}
    stream = create(anna, **kwargs)
    response_id = next(stream).response.id
    assert anna.responses.retrieve(response_id).status == "in_progress"
    stream.close()
    deadline = time.monotonic() + 30
    while anna.responses.retrieve(response_id).status == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert anna.responses.retrieve(response_id).status == "cancelled"


def test_responses_of_another_key_are_not_found(anna, ben):
    response = create(anna)
    for use in (ben.responses.retrieve, ben.responses.delete, ben.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            use(response.id)
    for fields in (
        {"previous_response_id": response.id},
        {"text": [{"type": "item_reference", "id": response.output[0].id}]},
    ):
        with pytest.raises(openai.NotFoundError):
            create(ben, **fields)
    assert anna.responses.retrieve(response.id).id == response.id


def test_a_full_store_deletes_the_oldest_responses_of_the_same_key_only(anna, ben):
    kept = create(ben)
    responses = [create(anna) for _ in range(STORED + 1)]
    with pytest.raises(openai.NotFoundError):
        anna.responses.retrieve(responses[0].id)
    for response in responses[1:]:
        assert anna.responses.retrieve(response.id).id == response.id
    assert ben.responses.retrieve(kept.id).id == kept.id


def test_tools_are_called_and_their_results_are_used(anna):
    fields = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200}
    fields["extra_body"] = {"thinking_budget": 5}
    response = create(anna, **fields)
    call = response.output[-1]
    assert (call.type, call.name) == ("function_call", "add")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    events = list(create(anna, stream=True, **fields))
    deltas = [event.delta for event in events if event.type.endswith("arguments.delta")]
    assert "".join(deltas) == call.arguments
    assert events[-1].response.status == response.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5555"}
    fields |= {"tool_choice": "none", "max_output_tokens": 8, "previous_response_id": response.id}
    answer = create(anna, [result], **fields)
    assert answer.usage.input_tokens > response.usage.input_tokens


def test_reasoning_is_an_item_before_the_text(anna):
    fields = {"max_output_tokens": 24, "extra_body": {"thinking_budget": 5}}
    response = create(anna, **fields)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    events = list(create(anna, stream=True, reasoning={"summary": "auto"}, **fields))
    summary = [event.delta for event in events if event.type.endswith("summary_text.delta")]
    assert "".join(summary) == response.output[0].content[0].text
    include = ["reasoning.encrypted_content"]
    hidden = create(anna, include=include, store=False, **fields).output[0]
    assert hidden.encrypted_content
    item = {"type": "reasoning", "id": hidden.id, "summary": []}
    item["encrypted_content"] = hidden.encrypted_content
    items = [{"role": "user", "content": TEXT}, item, {"role": "user", "content": "And?"}]
    assert create(anna, items, **fields).output
    with pytest.raises(openai.BadRequestError) as caught:
        create(anna, [{**item, "encrypted_content": "%"}, items[0]])
    assert caught.value.param == "input[0].encrypted_content"


@pytest.mark.parametrize("streamed", [False, True])
def test_the_text_matches_the_json_schema(client, streamed):
    kwargs = {"model": "demo", "input": TEXT, "temperature": 0, "max_output_tokens": 200}
    response = client.responses.create(**kwargs, text=FORMAT, stream=streamed)
    if streamed:
        response = list(response)[-1].response
    jsonschema.validate(json.loads(response.output_text), SCHEMA)


def test_truncation_drops_the_oldest_messages_and_keeps_the_instructions(server, client):
    old = [{"role": "user", "content": "word " * 150}, {"role": "assistant", "content": "Yes."}]
    items = [*old, *old, {"role": "user", "content": TEXT}]
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, items)
    assert caught.value.code == "context_length_exceeded"
    response = create(client, items, truncation="auto", instructions="Be short.")
    kept = create(client, items[2:], instructions="Be short.")
    assert response.usage.input_tokens == kept.usage.input_tokens
    assert response.output_text == kept.output_text


def test_log_probabilities_are_included(client):
    include = ["message.output_text.logprobs"]
    part = create(client, include=include, top_logprobs=2).output[0].content[0]
    assert len(part.logprobs) == 8 and len(part.logprobs[0].top_logprobs) == 2


@pytest.mark.soak
def test_stored_responses_survive_a_restart(serving, tmp_path):
    options = ("--model", "demo", "--max-model-len", "512", "--storage-dir", str(tmp_path))
    with serving(*options) as server, client_of(server.wait_until_ready()) as client:
        response = create(client)
    with serving(*options) as server, client_of(server.wait_until_ready()) as client:
        assert client.responses.retrieve(response.id).output_text == response.output_text
    assert (tmp_path / "data.sqlite").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": ["message"], "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"type": {}, "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "owner", "content": "x"}]}, "input"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "half"}, "truncation"),
        ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "previous_response_id": "../../etc/passwd"}, "previous_response_id"),
        ({"input": "x", "reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include"),
    ],
)
def test_the_error_for_an_invalid_field_names_it(server, fields, param):
    reply = server.post("/v1/responses", fields)
    assert reply.status in (400, 404), reply.content
    if param is not None:
        assert reply.error["param"] == param, reply.error


def test_hostile_requests_do_not_change_another_stream(server, client):
    expected, texts = create(client, max_output_tokens=64).output_text, []

    def read():
        texts.append(list(create(client, max_output_tokens=64, stream=True))[-1].response)

    thread = threading.Thread(target=read)
    thread.start()
    for body in ({"input": [{}]}, {"input": [[]] * 1000}, {"input": "x" * 100_000}, {"input": {}}):
        assert server.post("/v1/responses", body).status == 400
    for path in ("a/b/cancel", "..%2f..%2fdata.sqlite", "%00", "x" * 2000, "' OR 1=1"):
        name = path.replace(" ", "%20")
        assert server.get(f"/v1/responses/{name}").status in (400, 404, 414)
    thread.join()
    assert texts[0].output_text == expected


def test_repeated_references_to_an_item_are_limited(server, client):
    """A reference takes a few bytes, but the item that it names may be large."""
    response = create(client, max_output_tokens=200, extra_body={"ignore_eos": True})
    reference = {"type": "item_reference", "id": response.output[0].id}
    body = {"input": [reference] * 16_000, "store": False}
    reply = server.post("/v1/responses", body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        413,
        "body_too_large",
        "input",
    )
    unknown = [reference, {"type": "item_reference", "id": "msg_unknown"}]
    reply = server.post("/v1/responses", {"input": unknown})
    assert (reply.status, reply.error["code"]) == (404, "item_not_found")


def test_a_stored_conversation_is_limited(client):
    """Unknown fields of items are stored, but not rendered: each turn could add a whole body."""
    long = [{"role": "user", "content": TEXT, "unknown": "x" * 3_000_000}]
    fields = {"max_output_tokens": 1}
    first = create(client, long, **fields)
    second = create(client, long, previous_response_id=first.id, **fields)
    with pytest.raises(openai.APIStatusError) as caught:
        create(client, long, previous_response_id=second.id, **fields)
    assert (caught.value.status_code, caught.value.code) == (413, "conversation_too_long")
    assert create(client, TEXT, previous_response_id=second.id, store=False, **fields).output


def test_truncation_of_many_messages_takes_little_memory(server):
    messages = [{"role": "user", "content": "a"}] * 18_000
    body = {"input": messages, "truncation": "auto", "max_output_tokens": 1, "store": False}
    with open(f"/proc/{server.process.pid}/clear_refs", "w") as file:
        file.write("5")  # the peak of the resident memory starts again from the current value
    before = peak_bytes(server)
    assert server.post("/v1/responses", body).status == 200
    assert peak_bytes(server) - before < 200_000_000


def peak_bytes(server):
    with open(f"/proc/{server.process.pid}/status") as file:
        (line,) = [line for line in file if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def test_the_error_for_an_invalid_entry_names_its_field(server):
    body = {"model": "demo", "input": [{"role": "bob", "content": "x"}]}
    error = server.post("/v1/responses", body).error
    assert error["param"] == "input"
    assert error["message"].startswith("input: role is 'bob'; use one of: system, developer")
