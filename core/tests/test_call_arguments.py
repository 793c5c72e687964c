"""The arguments of `LLM`: one or several prompts."""

import pytest

from dovetail.engine.input.prompt_reading import read_prompt
from dovetail.entrypoints.call_arguments import list_prompts, read_conversation
from dovetail.errors import RequestError
from dovetail.interfaces.requested_config import LimitsConfig

MAX_LEN = 16
LIMITS = LimitsConfig(max_prompts=64)


@pytest.mark.parametrize("kind", [list, tuple, iter])
@pytest.mark.parametrize("count", [1, MAX_LEN, 3 * MAX_LEN])
def test_prompts_that_begin_with_a_number_are_several_prompts(kind, count):
    prompts = [5, *["a"] * count]
    assert list_prompts(kind(prompts), limits=LIMITS, max_model_len=MAX_LEN) == prompts


@pytest.mark.parametrize("kind", [list, tuple, iter])
@pytest.mark.parametrize("count", [1, MAX_LEN, 3 * MAX_LEN])
def test_numbers_are_the_tokens_of_one_prompt(kind, count):
    (prompt,) = list_prompts(kind([5] * count), limits=LIMITS, max_model_len=MAX_LEN)
    assert list(prompt)[: MAX_LEN + 1] == [5] * min(count, MAX_LEN + 1)


def test_too_many_prompts_that_begin_with_a_number_are_rejected():
    with pytest.raises(RequestError, match=r"more than 64 prompts.*\(max_prompts\)"):
        list_prompts(iter([5, *["a"] * 64]), limits=LIMITS, max_model_len=MAX_LEN)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "the prompt has the type int; pass a string"),
        ({"text": "a"}, "has the unknown key 'text'; .* Did you mean 'prompt'?"),
        ({"promt": "a"}, "has the unknown key 'promt'; .* Did you mean 'prompt'?"),
    ],
)
def test_the_message_for_an_invalid_prompt_says_what_is_accepted(prompt, message):
    with pytest.raises(RequestError, match=message):
        read_prompt(prompt)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("messages", "messages='hi' must be a list of messages, or a list of such lists."),
        (
            "messages[0]",
            'messages[0]=\'hi\' must be a mapping with "role" and "content", or a list of such '
            "mappings.",
        ),
    ],
)
def test_the_message_for_an_invalid_conversation_says_what_is_accepted(name, message):
    with pytest.raises(RequestError) as rejection:
        read_conversation(name, "hi", (), limits=LimitsConfig(), max_prompt_chars=100)
    assert str(rejection.value) == message
