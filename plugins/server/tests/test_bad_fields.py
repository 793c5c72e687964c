"""Invalid values of every field get a 4xx that names the field. Other requests are not affected."""

import json

import pytest

PROMPT = "Anna and Ben"
LONG = 2**70

INTEGERS = (
    "n",
    "best_of",
    "max_tokens",
    "min_tokens",
    "top_k",
    "seed",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "priority",
)
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
FLAGS = (
    "stream",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "return_token_ids",
    "return_tokens_as_token_ids",
)
LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")

COMMON = [
    *((name, value) for name in INTEGERS for value in ("1", 1.5, [], {}, True, LONG, -(2**64))),
    *((name, value) for name in NUMBERS for value in ("1", [], {}, True, 1e300, -1e300)),
    *((name, value) for name in FLAGS for value in ("true", 1, [], {})),
    *((name, value) for name in LISTS for value in ("1", 1, {}, [None], [[1]], [{}])),
    ("n", 0),
    ("n", 1025),
    ("best_of", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("min_tokens", 600),  # more than the model's length
    ("top_p", 0),
    ("top_p", 1.1),
    ("temperature", -0.1),
    ("repetition_penalty", 0),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("truncate_prompt_tokens", 0),
    ("stop", 1),
    ("stop", [1]),
    ("stop", ""),
    ("stop", ["a"] * 65),
    ("stop", "a" * 2000),
    ("stop", {"a": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [LONG]),
    ("stop_token_ids", [1.0]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [2048]),
    ("allowed_token_ids", [2**31]),
    ("bad_words", [""]),
    ("bad_words", ["a" * 300]),
    ("bad_words", ["a"] * 5000),
    ("logit_bias", []),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"9" * 5_000: 1}),
    ("logit_bias", {"1": None}),
    ("user", 1),
    ("user", "a" * 2000),
    ("cache_salt", ["a"]),
    ("cache_salt", "a" * 2000),
    ("model", 1),
    ("model", "another"),
    ("model", ""),
    ("stream_options", []),
    ("stream_options", {"include_usage": True}),
    ("response_format", "json"),
    ("response_format", {}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "json_object": True}),
    ("structured_outputs", {"json": 3}),
    ("guided_json", 3),
    ("guided_regex", "(a"),
    ("guided_choice", []),
    ("guided_grammar", "start"),
    ("tools", [{"type": "function"}]),
    ("use_beam_search", True),
    ("prompt_embeds", "AA=="),
]
COMPLETION = [
    ("prompt", None),
    ("prompt", 1),
    ("prompt", {}),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [None]),
    ("prompt", [1, "a"]),
    ("prompt", [1, 2.0]),
    ("prompt", [1, True]),
    ("prompt", [-1]),
    ("prompt", [2048]),
    ("prompt", [2**63]),
    ("prompt", [1] * 600),
    ("prompt", "a " * 5000),
    ("prompt", ["fine", {"a": 1}]),
    ("prompt", ["fine", [1, 99999]]),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("echo", "yes"),
    ("max_tokens", 0),
    ("suffix", "the end"),
    ("add_special_tokens", 1),
]
SURROGATE_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": '{"a": "\\ud800"}'},
        }
    ],
}
"""A call whose arguments are valid JSON, but contain a lone surrogate."""
CHAT = [
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", {}),
    ("messages", ["hi"]),
    ("messages", [{}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": 1, "content": "a"}]),
    *(("messages", [{"role": item, "content": "a"}]) for item in ("usr", "User", "end", "\u0000")),
    ("messages", [{"role": "user" * 10_000, "content": "a"}]),
    ("messages", [{"role": "user", "content": 1}]),
    ("messages", [{"role": "user", "content": [1]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages", [{"role": "user", "content": "a"}] * 5000),
    ("messages", [{"role": "user", "content": "a"}, SURROGATE_CALL]),
    ("messages", [{"role": "user", "content": "a " * 5000}]),
    ("max_completion_tokens", 0),
    ("max_completion_tokens", "1"),
    ("logprobs", 1),
    ("top_logprobs", 1),
    ("top_logprobs", True),
    ("add_generation_prompt", 1),
    ("continue_final_message", "yes"),
    ("chat_template", "{{ 1 }}"),
    ("chat_template", 1),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"self": 1}),
    ("chat_template_kwargs", {"tokenize": False}),
    ("tool_choice", "required"),
    ("functions", [{}]),
]


def check_rejection(reply, field):
    assert 400 <= reply.status < 500, (reply.status, reply.content[:300])
    error = reply.error
    assert error["code"] and error["message"].endswith((".", "?", "…")), error
    assert error["param"] is not None and error["param"].split("[")[0].split(".")[0] == field, error
    assert error["request_id"] == reply.headers["x-request-id"]
    assert " None " not in error["message"] and "=(" not in error["message"], error
    assert "Traceback" not in error["message"] and "/" not in error["message"], error


def case_id(case):
    return f"{case[0]}={json.dumps(case[1])[:40]}"


@pytest.mark.costly
@pytest.mark.parametrize("case", COMMON + COMPLETION, ids=case_id)
def test_the_error_for_an_invalid_field_of_a_completion_names_it(server, case):
    check_rejection(server.complete(**{"prompt": PROMPT, case[0]: case[1]}), case[0])


@pytest.mark.costly
@pytest.mark.parametrize("case", COMMON + CHAT, ids=case_id)
def test_the_error_for_an_invalid_field_of_a_chat_names_it(server, case):
    check_rejection(server.chat(**{"max_tokens": None, case[0]: case[1]}), case[0])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 1000, "prompt": [PROMPT] * 2000}, "n"),
    ],
)
def test_contradictory_fields_of_a_completion_are_rejected(server, fields, named):
    check_rejection(server.complete(**({"prompt": PROMPT} | fields)), named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_contradictory_fields_of_a_chat_are_rejected(server, fields, named):
    check_rejection(server.chat(**fields), named)


@pytest.mark.parametrize("value", ["", "a", "-1", "0", "nan", "inf", "1e9", "1" * 100])
def test_an_invalid_time_limit_is_rejected(server, value):
    for header in ("X-Request-Timeout", "X-First-Token-Timeout"):
        reply = server.post("/v1/completions", {"prompt": PROMPT}, **{header: value})
        assert reply.status == 400 and reply.error["param"] == header


def test_the_error_for_a_missing_field_names_it(server):
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        reply = server.post(path, {})
        check_rejection(reply, field)
        assert reply.error["code"] == "missing_required_parameter"


def test_an_optional_field_with_the_value_null_has_its_default(server):
    names = dict.fromkeys([*INTEGERS, *NUMBERS, *FLAGS, *LISTS, "stop", "user", "model", "tools"])
    assert server.complete(prompt=PROMPT, **(names | {"max_tokens": 2})).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_an_unsupported_media_type_is_rejected(server, kind):
    reply = server.send("POST", "/v1/completions", b'{"prompt": "a"}', {"Content-Type": kind})
    assert reply.status == 415 and reply.error["code"] == "unsupported_media_type"


def test_an_unsupported_content_encoding_is_rejected(server):
    sent = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert server.send("POST", "/v1/completions", b"{}", sent).status == 415


def test_a_body_with_too_many_values_is_rejected(server):
    sent = {"Content-Type": "application/json"}
    reply = server.send("POST", "/v1/completions", b'{"prompt": [' + b"1," * 300_000, sent)
    assert reply.status == 413 and reply.error["code"] == "body_too_large"


def test_bad_requests_do_not_change_the_responses_to_other_requests(server):
    expected = server.complete(prompt=PROMPT, max_tokens=32).json["choices"][0]["text"]
    mixed = server.complete(prompt=[PROMPT, [99999]])
    check_rejection(mixed, "prompt")
    assert server.complete(prompt=PROMPT, max_tokens=32).json["choices"][0]["text"] == expected
    assert server.get("/health").status == 200
