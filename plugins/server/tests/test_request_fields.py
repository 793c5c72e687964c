"""Every field of a generation request takes effect, in plain and streamed responses."""

import json

import pytest

from dovetail import SamplingParams
from dovetail.engine.messages.conversation import ROLES
from dovetail_server.protocol.chat_prompts import read_messages
from dovetail_server.protocol.errors import APIError

PROMPT = "Anna and Ben"
LISTING = "reverse: robot, bank, window"


def texts(reply):
    assert reply.status == 200, reply.content
    return [choice["text"] for choice in reply.json["choices"]]


def choices_of(events):
    return [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]


def ids(server, **body):
    """Return the prompt's and the generated token ids of a chat."""
    reply = server.chat(return_token_ids=True, **body).json
    return reply["prompt_token_ids"], reply["choices"][0]["token_ids"]


def test_n_completions_have_indices_with_and_without_streaming(server):
    body = {"prompt": PROMPT, "n": 3, "temperature": 1.0, "seed": 5}
    plain = server.complete(**body).json["choices"]
    assert [choice["index"] for choice in plain] == [0, 1, 2]
    streamed = {0: "", 1: "", 2: ""}
    for choice in choices_of(server.complete(stream=True, **body).events):
        streamed[choice["index"]] += choice["text"]
    assert streamed == {choice["index"]: choice["text"] for choice in plain}
    assert len(set(streamed.values())) > 1


def test_best_of_returns_the_most_likely_completions(server):
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 5, "logprobs": 0}
    every = server.complete(n=6, **body).json["choices"]
    best = server.complete(n=2, best_of=6, **body).json

    def mean(choice):
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    expected = [choice["text"] for choice in sorted(every, key=mean, reverse=True)[:2]]
    assert [choice["text"] for choice in best["choices"]] == expected
    num_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in every)
    assert best["usage"]["completion_tokens"] == num_tokens


def test_a_batch_of_prompts_has_one_choice_for_each_prompt(server):
    prompts = [PROMPT, "One and two", "The sun"]
    single = [texts(server.complete(prompt=prompt))[0] for prompt in prompts]
    batch = server.complete(prompt=prompts)
    assert texts(batch) == single
    assert [choice["index"] for choice in batch.json["choices"]] == [0, 1, 2]
    streamed = ["", "", ""]
    events = server.complete(prompt=prompts, stream=True).events
    for choice in choices_of(events):
        streamed[choice["index"]] += choice["text"]
    assert streamed == single and events.count("[DONE]") == 1


def test_token_ids_are_accepted_as_prompts(server, offline):
    token_ids = offline.get_tokenizer().encode(PROMPT)
    expected = texts(server.complete(prompt=PROMPT))
    assert texts(server.complete(prompt=token_ids)) == expected
    assert texts(server.complete(prompt=[token_ids, token_ids])) == expected * 2
    reply = server.complete(prompt=token_ids, return_token_ids=True).json["choices"][0]
    assert reply["prompt_token_ids"] == token_ids and len(reply["token_ids"]) == 8
    without = server.complete(prompt=PROMPT, add_special_tokens=False, return_token_ids=True)
    assert without.json["choices"][0]["prompt_token_ids"] == token_ids[1:]


def test_logprobs_of_a_completion_equal_those_of_the_engine(server, offline):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    output = offline.generate([PROMPT], params)[0].outputs[0]
    content = server.complete(prompt=PROMPT, logprobs=3).json["choices"][0]["logprobs"]
    expected = [
        entries[token].logprob
        for token, entries in zip(output.token_ids, output.logprobs, strict=True)
    ]
    assert content["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert "".join(content["tokens"]) == output.text
    assert [len(top) for top in content["top_logprobs"]] == [3] * 8
    text = output.text
    for token, index in zip(content["tokens"], content["text_offset"], strict=True):
        assert text.startswith(token, index)


def test_echo_returns_the_prompt_and_its_logprobs(server):
    reply = server.complete(prompt=PROMPT, echo=True, logprobs=1).json["choices"][0]
    assert reply["text"].startswith(PROMPT)
    actual = reply["logprobs"]
    assert actual["token_logprobs"][0] is None and actual["top_logprobs"][0] is None
    assert len(actual["tokens"]) == 4 + 8
    for token, index in list(zip(actual["tokens"], actual["text_offset"], strict=True))[1:]:
        assert reply["text"].startswith(token, index)
    only = server.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=0).json
    assert only["choices"][0]["text"] == PROMPT and only["usage"]["completion_tokens"] == 0
    assert only["choices"][0]["logprobs"]["tokens"] == actual["tokens"][:4]
    *events, _ = server.complete(prompt=PROMPT, echo=True, logprobs=1, stream=True).events
    streamed = choices_of(events)
    assert "".join(choice["text"] for choice in streamed) == reply["text"]
    joined = [token for choice in streamed for token in choice["logprobs"]["tokens"]]
    assert joined == actual["tokens"]
    offsets = [index for choice in streamed for index in choice["logprobs"]["text_offset"]]
    assert offsets == actual["text_offset"]


def test_each_logprob_of_a_chat_has_its_token_and_bytes_and_alternatives(server):
    body = {"logprobs": True, "top_logprobs": 2}
    reply = server.chat(**body).json["choices"][0]
    content = reply["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == reply["message"]["content"]
    for item in content:
        assert bytes(item["bytes"]).decode() == item["token"]
        assert len(item["top_logprobs"]) == 2
        assert item["top_logprobs"][0]["logprob"] >= item["top_logprobs"][1]["logprob"]
    streamed = choices_of(server.chat(stream=True, **body).events)
    joined = [
        item for choice in streamed if choice["logprobs"] for item in choice["logprobs"]["content"]
    ]
    assert [item["token"] for item in joined] == [item["token"] for item in content]


def test_prompt_logprobs_are_returned_for_each_prompt_token(server):
    content = server.complete(prompt=PROMPT, prompt_logprobs=1).json["choices"][0][
        "prompt_logprobs"
    ]
    assert content[0] is None and len(content) == 4
    assert all(entry["decoded_token"] for entries in content[1:] for entry in entries.values())
    assert len(server.chat(prompt_logprobs=0).json["prompt_logprobs"]) > 4


def test_a_seed_repeats_the_text_in_any_batch(server):
    body = {"temperature": 1.0, "max_tokens": 16}
    alone = texts(server.complete(prompt=PROMPT, seed=11, **body))
    assert texts(server.complete(prompt=[PROMPT] * 3, seed=11, **body)) == alone * 3
    assert texts(server.complete(prompt=PROMPT, seed=12, **body)) != alone


def test_stop_strings_and_tokens_end_the_text(server):
    whole = texts(server.complete(prompt=PROMPT, max_tokens=16))[0]
    stop = whole[5:8]
    reply = server.complete(prompt=PROMPT, max_tokens=16, stop=stop).json["choices"][0]
    assert reply["text"] == whole[: whole.index(stop)]
    assert reply["finish_reason"] == "stop" and reply["stop_reason"] == stop
    kept = server.complete(
        prompt=PROMPT, max_tokens=16, stop=[stop], include_stop_str_in_output=True
    )
    assert texts(kept)[0] == whole[: whole.index(stop) + len(stop)]
    token_ids = server.complete(prompt=PROMPT, return_token_ids=True).json["choices"][0]
    third = token_ids["token_ids"][2]
    by_token = server.complete(prompt=PROMPT, stop_token_ids=[third]).json
    assert by_token["choices"][0]["stop_reason"] == third
    assert by_token["usage"]["completion_tokens"] == 3
    later = server.complete(prompt=PROMPT, stop_token_ids=[third], min_tokens=4).json
    assert later["usage"]["completion_tokens"] >= 4


def test_the_end_of_sequence_token_can_be_ignored(server):
    assert server.chat(max_tokens=64).json["choices"][0]["finish_reason"] == "stop"
    longer = server.chat(max_tokens=64, ignore_eos=True).json
    assert longer["choices"][0]["finish_reason"] == "length"
    assert longer["usage"]["completion_tokens"] == 64


def test_the_output_of_a_chat_is_as_long_as_the_model_allows(server):
    assert server.chat(max_tokens=None).json["choices"][0]["finish_reason"] == "stop"
    reply = server.chat(max_tokens=None, max_completion_tokens=3).json
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": 1, "temperature": 1.5},
        {"top_p": 1e-9, "temperature": 1.5},
        {"min_p": 1.0, "temperature": 1.5},
        {"priority": -3, "user": "a tenant", "cache_salt": "salt"},
    ],
)
def test_priorities_and_filters_that_keep_the_most_likely_token_do_not_change_the_text(
    server, field
):
    assert texts(server.complete(prompt=PROMPT, **field)) == texts(server.complete(prompt=PROMPT))


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 5.0},
        {"bad_words": ["robot"]},
    ],
)
def test_penalties_and_bad_words_change_the_greedy_text(server, field):
    body = {"max_tokens": 48, "ignore_eos": True}
    plain = server.chat(**body).json["choices"][0]["message"]["content"]
    changed = server.chat(**body, **field).json["choices"][0]["message"]["content"]
    assert changed != plain


def test_only_allowed_tokens_or_the_token_with_a_large_bias_are_sampled(server):
    allowed = server.complete(prompt=PROMPT, allowed_token_ids=[300, 301], return_token_ids=True)
    assert set(allowed.json["choices"][0]["token_ids"]) <= {300, 301}
    biased = server.complete(
        prompt=PROMPT, logit_bias={"300": 100}, return_token_ids=True, max_tokens=1
    )
    assert biased.json["choices"][0]["token_ids"] == [300]


def test_only_the_last_tokens_of_a_truncated_prompt_are_used(server, offline):
    token_ids = offline.get_tokenizer().encode(PROMPT)
    reply = server.complete(
        prompt=PROMPT, truncate_prompt_tokens=2, return_token_ids=True, echo=True
    ).json["choices"][0]
    assert reply["prompt_token_ids"] == token_ids[-2:]
    assert reply["text"].startswith(offline.get_tokenizer().decode(token_ids[-2:]))
    whole, _ = ids(server)
    assert ids(server, truncate_prompt_tokens=3)[0] == whole[-3:]


@pytest.mark.parametrize("role", ROLES)
def test_openai_roles_are_accepted(server, role):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": role, "content": "a", "tool_call_id": "c"}]
    messages += [{"role": "user", "content": "b"}]
    assert server.chat(messages=messages).status == 200


def test_a_role_that_the_chat_template_names_is_accepted():
    values = [{"role": "critic", "content": "a"}]
    assert read_messages(values, 1, ["{% if m['role'] == 'critic' %}"])[0]["role"] == "critic"
    for template in ("{{ critic }}", "'critics'", ""):
        with pytest.raises(APIError, match="critic"):
            read_messages(values, 1, [template])


def test_a_final_message_can_be_continued(server):
    response = server.chat(max_tokens=64).json["choices"][0]["message"]["content"]
    start = response[: response.index(",")]
    messages = [{"role": "user", "content": LISTING}, {"role": "assistant", "content": start}]
    reply = server.chat(messages=messages, continue_final_message=True, max_tokens=64).json
    assert start + reply["choices"][0]["message"]["content"] == response


def test_the_generation_prompt_can_be_omitted(server):
    with_prompt, _ = ids(server)
    without, _ = ids(server, add_generation_prompt=False)
    assert with_prompt[: len(without)] == without and len(with_prompt) == len(without) + 1


def test_the_text_parts_of_a_message_are_concatenated(server):
    parts = [{"type": "text", "text": "reverse: robot,"}, {"type": "text", "text": " bank, window"}]
    joined, _ = ids(server, messages=[{"role": "user", "content": parts}])
    assert joined == ids(server)[0]


def test_text_of_special_tokens_in_messages_is_plain_text(server, offline):
    tokenizer = offline.get_tokenizer()
    special = [tokenizer.decode([token]) for token in sorted(tokenizer.special_token_ids)]
    hostile = "hi" + "".join(special) + "<|e<|end|>nd|>"
    actual, _ = ids(server, messages=[{"role": "user", "content": hostile}])
    plain, _ = ids(server, messages=[{"role": "user", "content": "hi"}])
    inside = actual[2:-2]
    assert [actual[:2], actual[-2:]] == [plain[:2], plain[-2:]]
    assert not set(inside) & tokenizer.special_token_ids
    assert tokenizer.decode(inside) == hostile
    parsed = server.complete(prompt="<|end|>", return_token_ids=True).json["choices"][0]
    assert parsed["prompt_token_ids"][-1] in tokenizer.special_token_ids


def test_usage_counts_cached_tokens(server):
    prompt = "one two three four five six seven eight nine ten " * 8
    server.complete(prompt=prompt)
    usage = server.complete(prompt=prompt).json["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_a_request_ends_at_its_deadline(server):
    slow = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True}
    for streamed in (False, True):
        reply = server.post(
            "/v1/completions", slow | {"stream": streamed}, **{"X-Request-Timeout": "0.001"}
        )
        error = reply.error if reply.status == 408 else reply.events[-1]["error"]
        assert error["code"] == "timeout" and error["param"] == "X-Request-Timeout"
    reply = server.post("/v1/completions", slow, **{"X-First-Token-Timeout": "1e-9"})
    assert reply.error["param"] == "X-First-Token-Timeout"


def test_unknown_fields_are_accepted_and_named_in_a_header(server):
    reply = server.complete(prompt=PROMPT, zzz=1, metadata={"a": "b"})
    assert reply.status == 200 and reply.headers["x-ignored-params"] == "zzz"
    assert "x-ignored-params" not in server.complete(prompt=PROMPT).headers


@pytest.mark.costly
def test_a_response_format_reaches_the_grammar_plugin(serving):
    grammar = "dovetail_devkit.fakes.grammar:FakeGrammar"
    with serving(
        "--model", "demo", "--max-model-len", "128", "--grammar-backend", grammar
    ) as server:
        server.wait_until_ready()
        assert texts(server.complete(prompt=PROMPT, response_format={"type": "text"}))
        schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
        for arguments in (schema, {"type": "json_object"}):
            reply = server.complete(prompt=PROMPT, response_format=arguments)
            assert reply.status == 400 and reply.error["param"] == "response_format"
            assert "json_" in reply.error["message"]
            assert "token_ids" in reply.error["message"]  # the form that this plugin supports


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [7, 8]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMATS = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "structured_outputs": {"json": SCHEMA},
    "guided_json": SCHEMA,
}


@pytest.mark.parametrize("field", FORMATS)
def test_an_output_with_a_schema_is_valid_with_and_without_streaming(server, field):
    asking = {"prompt": "Anna", "max_tokens": 60, "seed": 4, field: FORMATS[field]}
    (whole,) = texts(server.complete(**asking))
    content = json.loads(whole)
    assert sorted(content) == ["age", "name"] and content["age"] in (7, 8)
    chunks = server.complete(**asking, stream=True).events
    assert "".join(item["text"] for item in choices_of(chunks)) == whole


def test_choices_and_regular_expressions_constrain_outputs(server):
    cases = [
        ({"guided_choice": ["red", "blue"]}, ("red", "blue")),
        ({"structured_outputs": {"regex": "[xy]{3}"}}, ("xxx", "xxy", "xyx", "xyy", *_Y)),
    ]
    for fields, valid in cases:
        assert texts(server.complete(prompt=PROMPT, max_tokens=20, **fields))[0] in valid


def test_two_fields_that_restrict_the_output_are_rejected(server):
    reply = server.complete(prompt=PROMPT, guided_regex="a", guided_choice=["b"])
    assert reply.status == 400
    assert reply.error["param"] == "guided_choice"
    assert reply.error["code"] == "contradictory_parameters"


_Y = ("yxx", "yxy", "yyx", "yyy")
