"""A server serves completions and chats, plain and streamed, and reports its state."""

import json

import pytest

from dovetail import SamplingParams

PROMPT = "Anna and Ben"


def text_of(events, read):
    return "".join(
        read(event["choices"][0]) for event in events if event != "[DONE]" and event["choices"]
    )


@pytest.fixture(scope="module")
def expected(offline):
    """Return the outputs of the model without a server, for a prompt and for a chat."""
    params = SamplingParams(temperature=0, max_tokens=8)
    chat = offline.chat([{"role": "user", "content": "reverse: robot, bank, window"}], params)
    return offline.generate([PROMPT], params)[0], chat[0]


def test_the_status_of_a_running_server_is_reported(server):
    for path in ("/live", "/health", "/ready"):
        assert server.get(path).status == 200
    assert server.get("/version").json["version"]
    listed = server.get("/v1/models").json
    assert [item["id"] for item in listed["data"]] == ["demo"]
    assert listed["data"][0]["max_model_len"] == 512
    assert server.get("/v1/models/demo").json == listed["data"][0]
    assert server.get("/v1/models/other").error["code"] == "model_not_found"
    assert server.get("/load").json["server_load"] == 0


def test_a_completion_has_the_same_text_as_the_offline_engine(server, expected):
    reply = server.complete(model="demo", prompt=PROMPT)
    body, output = reply.json, expected[0]
    assert reply.status == 200 and body["object"] == "text_completion" and body["model"] == "demo"
    (choice,) = body["choices"]
    assert choice["text"] == output.outputs[0].text
    assert choice["finish_reason"] == output.outputs[0].finish_reason
    num_prompt = len(output.prompt_token_ids)
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert body["usage"]["total_tokens"] == num_prompt + body["usage"]["completion_tokens"]


def test_a_streamed_completion_has_the_same_text_and_one_final_event(server, expected):
    reply = server.complete(prompt=PROMPT, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, usage, end = reply.events
    assert end == "[DONE]" and reply.events.count("[DONE]") == 1
    assert text_of(events, lambda choice: choice["text"]) == expected[0].outputs[0].text
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8
    assert all(event["usage"] is None for event in events)


def test_a_chat_completion_has_the_same_text_as_the_offline_engine(server, expected):
    body = server.chat().json
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": expected[1].outputs[0].text,
        "refusal": None,
    }
    assert body["usage"]["prompt_tokens"] == len(expected[1].prompt_token_ids)


def test_a_streamed_chat_starts_with_the_role(server, expected):
    *events, end = server.chat(stream=True).events
    assert end == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = text_of(events, lambda choice: choice["delta"].get("content", ""))
    assert text == expected[1].outputs[0].text
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_an_error_has_the_openai_format_and_the_request_id(server):
    reply = server.post(
        "/v1/completions", {"prompt": PROMPT, "temperature": -1}, **{"X-Request-Id": "abc-1"}
    )
    assert reply.status == 400 and reply.headers["x-request-id"] == "abc-1"
    assert reply.error["param"] == "temperature" and reply.error["request_id"] == "abc-1"
    assert reply.error["type"] == "invalid_request_error" and reply.error["code"]
    assert "-1" in reply.error["message"]
    assert server.complete(prompt=PROMPT).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404), ("DELETE", "/live", 405)],
)
def test_a_wrong_path_or_method_gets_an_error_with_a_code(server, method, path, status):
    reply = server.send(method, path)
    assert reply.status == status and reply.error["code"]


def test_a_body_that_is_not_a_json_object_is_rejected(server):
    sent = {"Content-Type": "application/json"}
    for body in (b"", b"{", b"[]", b"\xff", b'{"prompt": "a"} x', b"[" * 10_000):
        reply = server.send("POST", "/v1/completions", body, sent)
        assert reply.status == 400 and reply.error["code"] == "invalid_json", body
    plain = server.send("POST", "/v1/completions", json.dumps({"prompt": "a"}), {})
    assert plain.status == 415


def test_a_start_logs_few_lines_and_the_log_contains_no_prompt(server):
    server.complete(prompt="a secret prompt")
    server.complete(prompt="a secret prompt", temperature=-1)
    lines = list(server.lines)
    ready = next(index for index, line in enumerate(lines) if "Ready" in line)
    assert ready <= 12
    assert not any("secret" in line for line in lines)
