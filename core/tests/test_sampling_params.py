import dataclasses
import inspect
import math

import pytest

from dovetail.errors import RequestError, UserError
from dovetail.pooling_params import PoolingParams
from dovetail.sampling_params import ReasoningParams, SamplingParams, StructuredOutputsParams


def test_the_default_parameters_are_valid_and_sample_randomly():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1, 0, 16)
    assert not params.greedy


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False)])
def test_a_temperature_near_zero_means_greedy_sampling(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), (("a",), ("a",))],
)
def test_stop_strings_become_a_tuple(arguments, expected):
    assert SamplingParams(stop=arguments).stop_strings == expected


def test_lists_in_parameters_become_immutable_tuples():
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, bad_words=["x"])
    ids.append(3)
    assert (params.stop_token_ids, params.allowed_token_ids) == ((1, 2), (1, 2))
    assert params.bad_words == ("x",)


def test_allowed_token_ids_none_differs_from_an_empty_list():
    assert SamplingParams().allowed_token_ids is None
    assert SamplingParams().stop_token_ids == ()


def test_both_values_that_disable_top_k_are_equal():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_nested_parameters_are_checked_and_copied():
    class Mine(StructuredOutputsParams):
        pass

    params = SamplingParams(structured_outputs=Mine(form="regex", text="a+"))
    assert type(params.structured_outputs) is StructuredOutputsParams
    assert (params.structured_outputs.form, params.structured_outputs.text) == ("regex", "a+")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.structured_outputs.text = "b"
    assert params.own_copy() is params


@pytest.mark.parametrize(
    ("section", "parameter"),
    [
        ({"form": "", "text": "a"}, "structured_outputs.form"),
        ({"form": "x" * 65, "text": "a"}, "structured_outputs.form"),
        ({"form": 3, "text": "a"}, "structured_outputs.form"),
        ({"form": "regex", "text": ""}, "structured_outputs.text"),
        ({"form": "regex", "text": "a" * (2**18 + 1)}, "structured_outputs.text"),
        ({"form": "regex", "text": "\ud800"}, "structured_outputs.text"),
        ({"form": "regex", "text": b"a"}, "structured_outputs.text"),
    ],
)
def test_the_error_for_invalid_nested_parameters_names_the_field(section, parameter):
    with pytest.raises(RequestError) as rejection:
        StructuredOutputsParams(**section)
    assert rejection.value.parameter == parameter


def test_structured_output_without_an_end_token_is_rejected():
    section = StructuredOutputsParams(form="regex", text="a+")
    with pytest.raises(RequestError, match="needs a token that ends the text") as rejection:
        SamplingParams(structured_outputs=section, ignore_eos=True)
    assert rejection.value.parameter == "structured_outputs"
    SamplingParams(structured_outputs=section, ignore_eos=True, stop_token_ids=[3])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SamplingParams(temprature=1),
            "SamplingParams has no parameter 'temprature'. Did you mean 'temperature'?",
        ),
        (
            lambda: dataclasses.replace(SamplingParams(), topp=0.5),
            "SamplingParams has no parameter 'topp'. Did you mean 'top_p'?",
        ),
        (
            lambda: ReasoningParams(end="x", budgett=5),
            "ReasoningParams has no parameter 'budgett'. Did you mean 'budget'?",
        ),
        (
            lambda: PoolingParams(dimension=5),
            "PoolingParams has no parameter 'dimension'. Did you mean 'dimensions'?",
        ),
        (
            lambda: StructuredOutputsParams(zz=5),
            "structured_outputs has no parameter 'zz'. Parameters: json, json_object, regex, "
            "choice, grammar, structural_tag.",
        ),
    ],
)
def test_an_unknown_parameter_is_rejected_with_the_most_similar_name(make, message):
    with pytest.raises(RequestError) as rejection:
        make()
    assert str(rejection.value) == message
    prefix = "structured_outputs." if message.startswith("structured_outputs") else ""
    assert rejection.value.parameter == prefix + message.split("'")[1]


def test_the_constructors_keep_their_signatures():
    assert "temperature" in inspect.signature(SamplingParams).parameters
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)


REFUSED = [
    ("structured_outputs", "a+"),
    ("structured_outputs", {"form": "regex", "text": "a+"}),
    ("structured_outputs", False),
    ("n", 0),
    ("n", 1025),
    ("n", 1.0),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 2.0),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.nan),
    ("seed", 2**64),
    ("seed", 0.5),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("prompt_logprobs", 1025),
    ("truncate_prompt_tokens", 0),
    ("stop", ""),
    ("stop", ["a", 3]),
    ("stop", {"a"}),
    ("stop", ["x"] * 65),
    ("bad_words", [""]),
    ("bad_words", "text"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", 7),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [2**31]),
    ("logit_bias", {1: 101}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", [(1, 2)]),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_errors_for_values_out_of_bounds_name_the_parameter(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)
    assert isinstance(caught.value, UserError)


ACCEPTED = [
    ("n", 1024),
    ("temperature", 0),
    ("temperature", 100),
    ("top_p", 1e-9),
    ("min_p", 1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2),
    ("repetition_penalty", 1e-3),
    ("seed", -(2**63)),
    ("seed", 2**64 - 1),
    ("max_tokens", None),
    ("logprobs", 0),
    ("stop", ["x"] * 64),
    ("logit_bias", {5: -100}),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_values_equal_to_their_bounds_are_accepted(name, value):
    SamplingParams(**{name: value}).validate()


def test_the_error_for_a_value_out_of_bounds_states_value_and_bounds():
    with pytest.raises(RequestError, match=r"top_p=1\.5 must be above 0 and at most 1\."):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"max_tokens=0 must be None or an integer from 1 to"):
        SamplingParams(max_tokens=0)


def test_long_values_are_shortened_in_errors():
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["word"] * 1000)
    assert len(str(caught.value)) < 200


def test_contradictory_parameters_are_rejected():
    with pytest.raises(RequestError, match="min_tokens=5 is more than max_tokens=4") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.parameter == "min_tokens"
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    SamplingParams(min_tokens=5, max_tokens=None)


def test_sampling_parameters_are_frozen_and_replace_checks_new_values():
    params = SamplingParams(stop="x", top_k=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 6
    assert dataclasses.replace(params, n=2).stop_strings == ("x",)
    with pytest.raises(RequestError):
        dataclasses.replace(params, n=0)


def test_the_engine_rejects_invalid_values_that_bypassed_the_front_end():
    params = SamplingParams()
    object.__setattr__(params, "top_p", 7.0)
    with pytest.raises(RequestError, match="top_p"):
        params.validate()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": 5}, "stop=5 must be a string or a list of strings."),
        ({"bad_words": "x"}, "bad_words='x' must be a list of strings."),
        (
            {"stop_token_ids": [3, "a"]},
            "stop_token_ids contains 'a'; token ids must be integers from 0 to 2147483647.",
        ),
        (
            {"logit_bias": {"a": 1}},
            "logit_bias contains 'a'; token ids must be integers from 0 to 2147483647.",
        ),
    ],
    ids=str,
)
def test_the_message_for_an_invalid_list_shows_the_invalid_entry_and_what_is_accepted(
    values, message
):
    with pytest.raises(RequestError) as rejection:
        SamplingParams(**values)
    assert str(rejection.value) == message
