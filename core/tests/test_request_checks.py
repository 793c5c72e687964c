from dataclasses import replace

import pytest

from dovetail.engine.request_checks import validate_core_request
from dovetail.errors import RequestError
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
def test_what_no_worker_can_do_is_refused_by_name(field, value, capability):
    check(capability, **{field: value})
    with pytest.raises(RequestError, match=f"does not provide '{capability}'") as refusal:
        check("logits_processors", **{field: value})
    assert refusal.value.parameter == field


@pytest.mark.parametrize(
    "inputs",
    [
        (IMAGE, replace(IMAGE, position=5)),
        (replace(IMAGE, position=0), replace(IMAGE, position=7)),
    ],
)
def test_content_side_by_side_and_up_to_the_last_token_is_taken(inputs):
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
def test_content_that_does_not_fit_the_prompt_is_refused(inputs):
    with pytest.raises(RequestError) as refusal:
        check("encoder", encoder_inputs=inputs)
    assert refusal.value.parameter == "encoder_inputs"


@pytest.mark.parametrize(
    ("field", "value"),
    [("tenant", 3), ("lora_id", None), ("deadline_ns", -1), ("deadline_ns", "soon")],
)
def test_odd_values_are_refused(field, value):
    with pytest.raises(RequestError) as refusal:
        check("lora", **{field: value})
    assert refusal.value.parameter == field
