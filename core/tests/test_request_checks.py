import inspect
from dataclasses import replace

import pytest

from dovetail.engine.input.request_checks import CoreRequestChecker, validate_core_request
from dovetail.errors import RequestError
from dovetail.inputs import PromptTraits
from dovetail.interfaces import FULL_SAMPLING, SAMPLING_CAPABILITIES, RequestView
from dovetail.request import EncoderInput, EngineCoreRequest
from dovetail.sampling_params import SamplingParams

GOOD = EngineCoreRequest(
    request_id="r",
    prompt_token_ids=tuple(range(10)),
    sampling_params=SamplingParams(),
    max_tokens=4,
)
IMAGE = EncoderInput(position=2, num_tokens=3, content_hash=b"cat")


def check(*provides, **changes):
    validate_core_request(
        replace(GOOD, **changes),
        vocab_size=100,
        max_model_len=32,
        worker_provides=frozenset(provides),
    )


@pytest.mark.parametrize(
    ("field", "value", "capability"),
    [("lora_id", "poet", "lora"), ("encoder_inputs", (IMAGE,), "encoder")],
)
def test_the_error_for_a_feature_without_worker_support_names_it(field, value, capability):
    check(capability, **{field: value})
    with pytest.raises(RequestError, match=f"does not declare '{capability}'") as rejection:
        check("logits_processors", **{field: value})
    assert rejection.value.parameter == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 5),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {3: 1.0}),
        ("allowed_token_ids", [3]),
        ("bad_words", ["no"]),
        ("min_tokens", 2),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
    ],
)
def test_a_parameter_without_worker_support_is_rejected(field, value):
    params = SamplingParams(**{field: value})
    capability = SAMPLING_CAPABILITIES[field]
    check(capability, sampling_params=params)
    check(*FULL_SAMPLING, sampling_params=params)
    with pytest.raises(RequestError, match=f"{field}=.*the capability '{capability}'") as rejection:
        check(*FULL_SAMPLING - {capability}, sampling_params=params)
    assert rejection.value.parameter == field


def test_parameters_without_effect_do_not_need_a_capability():
    check(sampling_params=SamplingParams(temperature=0.5, seed=3, stop_token_ids=[1], n=2))
    check(sampling_params=SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1))
    check(sampling_params=SamplingParams(top_k=-1, bad_words=[], logit_bias={}, min_tokens=0))


@pytest.mark.parametrize(
    "inputs",
    [
        (IMAGE, replace(IMAGE, position=5)),
        (replace(IMAGE, position=0), replace(IMAGE, position=7)),
    ],
)
def test_adjacent_multimodal_inputs_up_to_the_last_token_are_accepted(inputs):
    check("encoder", encoder_inputs=inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        [IMAGE],
        5,
        ("cat",),
        (replace(IMAGE, position=-1),),
        (replace(IMAGE, position=1.0),),
        (replace(IMAGE, num_tokens=0),),
        (replace(IMAGE, num_tokens=True),),
        (replace(IMAGE, content_hash=b""),),
        (replace(IMAGE, content_hash="cat"),),
        (IMAGE, IMAGE),
        (IMAGE, replace(IMAGE, position=4)),
        (replace(IMAGE, position=5), IMAGE),
        (replace(IMAGE, position=8),),
    ],
)
def test_multimodal_inputs_outside_of_the_prompt_are_rejected(inputs):
    with pytest.raises(RequestError) as rejection:
        check("encoder", encoder_inputs=inputs)
    assert rejection.value.parameter == "encoder_inputs"


@pytest.mark.parametrize(
    ("field", "value"),
    [("tenant", 3), ("lora_id", None), ("deadline_ns", -1), ("deadline_ns", "soon")],
)
def test_request_values_of_wrong_types_are_rejected(field, value):
    with pytest.raises(RequestError) as rejection:
        check("lora", **{field: value})
    assert rejection.value.parameter == field


def test_every_deadline_is_documented_as_the_deadline_of_the_first_token():
    named = (EngineCoreRequest, PromptTraits, RequestView.deadline_ns)
    meanings = [" ".join(inspect.getdoc(item).split()) for item in named]
    assert all("first token" in meaning for meaning in meanings)
    assert not any("answer" in meaning for meaning in meanings)


def test_parameters_that_several_requests_share_are_checked_once(monkeypatch):
    calls = []
    monkeypatch.setattr(SamplingParams, "validate", lambda self: calls.append(self))
    checker = CoreRequestChecker(vocab_size=100, max_model_len=32)
    shared, other = SamplingParams(seed=5), SamplingParams(seed=5)
    for params in (shared, shared, other, shared):
        checker.check(replace(GOOD, sampling_params=params))
    assert calls == [shared, other, shared] and calls[0] is calls[2] is shared


def test_parameters_with_mappings_are_checked_for_every_request():
    checker = CoreRequestChecker(vocab_size=100, max_model_len=32, worker_provides=FULL_SAMPLING)
    params = SamplingParams(logit_bias={5: 1.0})
    checker.check(replace(GOOD, sampling_params=params))
    params.logit_bias[100] = 1.0
    with pytest.raises(RequestError, match="logit_bias"):
        checker.check(replace(GOOD, sampling_params=params))


def test_the_other_fields_are_checked_even_if_the_parameters_were_checked_before():
    checker = CoreRequestChecker(vocab_size=100, max_model_len=32)
    checker.check(GOOD)
    with pytest.raises(RequestError, match="max_tokens"):
        checker.check(replace(GOOD, max_tokens=0))
    with pytest.raises(RequestError, match="prompt"):
        checker.check(replace(GOOD, prompt_token_ids=(100,)))
