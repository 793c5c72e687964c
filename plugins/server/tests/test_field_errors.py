"""The messages for invalid fields and bodies, without a server."""

import pytest

from dovetail.value_checks import invalid
from dovetail_server.protocol.errors import APIError, api_error
from dovetail_server.protocol.fields import ChatRequest, read_fields
from dovetail_server.protocol.pooling import EmbeddingRequest
from dovetail_server.settings import ServerSettings
from dovetail_server.transport.body import read_json_object


@pytest.mark.parametrize("value", ["hex", 5])
def test_the_error_for_a_wrong_choice_lists_the_choices(value):
    with pytest.raises(APIError) as rejection:
        read_fields({"input": "a", "encoding_format": value}, EmbeddingRequest, strict=True)
    assert str(rejection.value) == "The field encoding_format must be one of: float, base64."
    assert rejection.value.param == "encoding_format"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages": "hi"}, "The field messages must be a list, not a string."),
        ({"messages": ["hi"]}, "The field messages[0] must be an object, not a string."),
        ({"messages": [], "n": 1.5}, "The field n must be an integer or null, not a number."),
        ({}, "The field messages is missing."),
    ],
)
def test_the_error_for_a_wrong_type_names_the_field_and_both_types(values, message):
    with pytest.raises(APIError) as rejection:
        read_fields(values, ChatRequest, strict=True)
    assert str(rejection.value) == message
    assert rejection.value.param and f" {rejection.value.param} " in message


def test_the_error_for_an_empty_body_says_so():
    with pytest.raises(APIError) as rejection:
        read_json_object({"content-type": "application/json"}, b"", ServerSettings())
    assert str(rejection.value) == "The body is empty; send a JSON object."
    assert rejection.value.code == "invalid_json"


def test_the_error_for_a_missing_value_says_null():
    error = invalid("tools[0].function", None, "an object with a name")
    assert str(api_error(error)) == "tools[0].function=null must be an object with a name."
