"""The routes of the tokenizer, and those of pooling models."""

import pytest

from dovetail_server.routes.tokens import MAX_TEXT_CHARS

TEXT = "One and two"


def test_the_tokenize_route_returns_the_tokens_of_the_tokenizer(server, offline):
    tokenizer = offline.get_tokenizer()
    body = server.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}).json
    assert body["tokens"] == tokenizer.encode(TEXT) and body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 512 and "".join(body["token_strs"][1:]) == TEXT
    without = server.post("/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json
    assert without["tokens"] == tokenizer.encode(TEXT, add_special_tokens=False)
    assert server.post("/detokenize", {"tokens": without["tokens"]}).json == {"prompt": TEXT}


def test_a_conversation_has_the_same_tokens_as_in_a_chat_request(server):
    messages = [{"role": "user", "content": "reverse: robot, bank, window"}]
    chat = server.chat(messages=messages, return_token_ids=True).json["prompt_token_ids"]
    assert server.post("/tokenize", {"messages": messages}).json["tokens"] == chat


def test_the_tokenizer_info_route_describes_the_tokenizer(server, offline):
    info = server.get("/tokenizer_info").json
    assert info["eos_token"] == "<|eos|>" and info["bos_token"] == "<|bos|>"
    assert info["eos_token_id"] == offline.get_tokenizer().eos_token_id
    assert "messages" in info["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "another"}, "model"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{}]}, "messages"),
        ("/tokenize", {"messages": "a"}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [2048]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": 1}, "model"),
    ],
    ids=str,
)
def test_the_error_of_a_tokenizer_route_names_the_invalid_field(server, path, body, param):
    reply = server.post(path, body)
    assert 400 <= reply.status < 500, reply.content
    assert reply.error["param"].split("[")[0].split(".")[0] == param and reply.error["code"]


def test_a_text_that_is_too_long_to_be_tokenized_is_rejected(server):
    reply = server.post("/tokenize", {"prompt": "a" * (MAX_TEXT_CHARS + 1)})
    assert reply.status == 400 and reply.error["param"] == "prompt"
    assert "1048577 characters" in reply.error["message"]


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/classify", "/pooling"]
)
def test_the_error_of_a_pooling_route_names_the_tasks_of_the_model(server, path):
    reply = server.post(path, {"input": "a", "model": "demo"})
    assert reply.status == 400 and reply.error["code"] == "unsupported_task"
    assert "generate" in reply.error["message"] and reply.error["param"] == "model"
    assert server.post(path, {"model": "another"}).error["code"] == "model_not_found"
    assert server.post(path, {"model": 1}).error["param"] == "model"
