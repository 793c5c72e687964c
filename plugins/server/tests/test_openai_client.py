"""The client library of OpenAI for Python works with the server without changes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = pytest.mark.costly  # the tests share servers

PROMPT = "Anna and Ben"
MESSAGES = [{"role": "user", "content": "reverse: robot, bank, window"}]
KEY, OPERATOR = "key-of-a-client", "key-of-operators"


def address_of(server):
    return f"http://{server.host}:{server.port}/v1"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=address_of(server), api_key="any", max_retries=0) as created:
        yield created


def complete(client, **fields):
    kwargs = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    return client.completions.create(**(kwargs | fields))


def chat(client, **fields):
    kwargs = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    return client.chat.completions.create(**(kwargs | fields))


def test_the_client_lists_the_model(client):
    assert [item.id for item in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"


def test_a_completion_and_its_stream_have_the_same_text(client):
    response = complete(client)
    assert response.usage.completion_tokens == 8
    assert response.choices[0].finish_reason == "length"
    parts = list(complete(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.text for part in parts for choice in part.choices)
    assert text == response.choices[0].text
    assert parts[-1].usage.total_tokens == response.usage.total_tokens


def test_a_chat_and_its_stream_have_the_same_text(client):
    response = chat(client, user="anna", seed=1)
    message = response.choices[0].message
    assert message.role == "assistant" and message.content
    parts = list(chat(client, stream=True, user="anna", seed=1))
    deltas = [choice.delta for part in parts for choice in part.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_chat_has_log_probabilities(client):
    (choice,) = chat(client, logprobs=True, top_logprobs=3).choices
    assert len(choice.logprobs.content) == 8
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top_logprob.logprob for top_logprob in token.top_logprobs) <= 0


def test_a_completion_has_log_probabilities_of_the_prompt(client):
    (choice,) = complete(client, logprobs=2, echo=True, max_tokens=2).choices
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset)


@pytest.mark.parametrize("streamed", [False, True])
def test_several_choices_have_their_indices(client, streamed):
    response = chat(client, n=3, temperature=1, seed=5, stream=streamed)
    parts = response if streamed else [response]
    assert {choice.index for part in parts for choice in part.choices} == {0, 1, 2}


def test_fields_of_extra_body_that_openai_lacks_take_effect(client):
    response = complete(client, extra_body={"top_k": 1, "min_tokens": 4, "ignore_eos": True})
    assert response.usage.completion_tokens == 8


def test_a_stream_that_is_closed_early_ends_its_request(client, server):
    with complete(client, stream=True, max_tokens=400) as stream:
        next(iter(stream))
    assert complete(client).choices[0].text


def test_the_stream_helper_of_the_client_collects_the_whole_message(client):
    text = chat(client).choices[0].message.content
    fields = {"model": "demo", "messages": MESSAGES, "temperature": 0, "stop": text[4:8]}
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == text[: text.index(text[4:8])]


def test_the_raw_response_has_the_request_id(client):
    response = chat(client, extra_headers={"X-Request-Id": "mine-1"})
    assert response._request_id == "mine-1"


def test_many_requests_of_the_asynchronous_client_run_concurrently(server):
    async def ask():
        async with openai.AsyncOpenAI(
            base_url=address_of(server), api_key="any", max_retries=0
        ) as client:
            results = await asyncio.gather(*(chat(client) for _ in range(16)))
            stream = await chat(client, stream=True)
            parts = [part async for part in stream]
            return [response.choices[0].message.content for response in results], parts

    texts, parts = asyncio.run(ask())
    assert len(set(texts)) == 1
    deltas = [choice.delta for part in parts for choice in part.choices]
    assert "".join(delta.content or "" for delta in deltas) == texts[0]


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"prompt": "x" * 20_000}, openai.BadRequestError, "prompt"),
        ({"suffix": "end"}, openai.BadRequestError, "suffix"),
        ({"model": "absent"}, openai.NotFoundError, "model"),
    ],
)
def test_error_responses_become_exceptions_of_the_client_library(client, fields, kind, param):
    with pytest.raises(kind) as caught:
        complete(client, **fields)
    assert caught.value.param == param and caught.value.code
    assert caught.value.request_id == caught.value.body["request_id"]


def test_embeddings_are_rejected_with_a_reason(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="demo", input="a")
    assert caught.value.code == "unsupported_task"


def test_a_wrong_key_and_a_full_queue_raise_exceptions_of_the_client_library(serving):
    limits = ("--max-num-seqs", "1", "--max-waiting", "0")
    with (
        serving("--model", "demo", "--api-key", KEY, "--admin-key", OPERATOR, *limits) as running,
        ThreadPoolExecutor() as pool,
    ):
        address = address_of(running.wait_until_ready())
        invalid = openai.OpenAI(base_url=address, api_key="wrong", max_retries=0)
        right = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
        with invalid, right:
            with pytest.raises(openai.AuthenticationError):
                complete(invalid)
            operator = {"Authorization": f"Bearer {OPERATOR}"}
            assert running.post("/pause", {}, **operator).status == 200
            held = pool.submit(complete, right)
            while not running.get("/load", Authorization=f"Bearer {KEY}").json["server_load"]:
                assert not held.done()
            with pytest.raises(openai.RateLimitError) as caught:
                complete(right)
            assert caught.value.code == "queue_full"
            assert running.post("/resume", {}, **operator).status == 200
            assert held.result(60).choices
