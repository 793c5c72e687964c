"""Invalid requests: the error names the parameter, and other requests are not affected."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.llm_engine import LLMEngine
from dovetail.errors import RequestError
from dovetail.request import EngineCoreRequest
from end_to_end.checkpoints import OPTIONS

VICTIM = "The lazy dog"
VOCAB = 320
LENGTH = 256
OUT_OF_RANGE = [-1, VOCAB, 2**31, 2**63]
LONE_SURROGATE = "\ud800"

BAD_PROMPTS = {
    "empty list": [],
    "empty ids": {"prompt_token_ids": []},
    "prompt of max_model_len tokens": [5] * LENGTH,
    "prompt far above max_model_len": "word " * 5000,
    "a number": 5,
    "nothing": None,
    "bytes": b"text",
    "a float among ids": [1, 2.5],
    "a string among ids": [1, "2"],
    "a bool among ids": [1, True],
    "an unknown key": {"promt": "hello"},
    "an empty mapping": {},
    "a lone surrogate": LONE_SURROGATE,
    **{f"id {token}": {"prompt_token_ids": [5, token]} for token in OUT_OF_RANGE},
}

BAD_PARAMS = {
    "n 0": ("n", {"n": 0}),
    "n huge": ("n", {"n": 10**9}),
    "temperature negative": ("temperature", {"temperature": -0.1}),
    "temperature nan": ("temperature", {"temperature": math.nan}),
    "temperature infinite": ("temperature", {"temperature": math.inf}),
    "temperature huge": ("temperature", {"temperature": 1e30}),
    "temperature text": ("temperature", {"temperature": "hot"}),
    "top_p 0": ("top_p", {"top_p": 0.0}),
    "top_p 2": ("top_p", {"top_p": 2.0}),
    "top_p nan": ("top_p", {"top_p": math.nan}),
    "top_k -2": ("top_k", {"top_k": -2}),
    "top_k huge": ("top_k", {"top_k": 2**40}),
    "min_p negative": ("min_p", {"min_p": -1e-9}),
    "presence": ("presence_penalty", {"presence_penalty": 2.1}),
    "frequency": ("frequency_penalty", {"frequency_penalty": -math.inf}),
    "repetition 0": ("repetition_penalty", {"repetition_penalty": 0.0}),
    "bad word that is not text": ("bad_words", {"bad_words": [LONE_SURROGATE]}),
    "stop string that is not text": ("stop", {"stop": [LONE_SURROGATE]}),
    "max_tokens 0": ("max_tokens", {"max_tokens": 0}),
    "max_tokens negative": ("max_tokens", {"max_tokens": -5}),
    "max_tokens huge": ("max_tokens", {"max_tokens": 2**63}),
    "min_tokens above max_tokens": ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    "logprobs negative": ("logprobs", {"logprobs": -1}),
    "prompt_logprobs huge": ("prompt_logprobs", {"prompt_logprobs": 10**6}),
    "seed huge": ("seed", {"seed": 2**64}),
    "empty stop string": ("stop", {"stop": [""]}),
    "stop string that is a number": ("stop", {"stop": [5]}),
    "stop string without detokenization": ("stop", {"stop": "x", "detokenize": False}),
    "no allowed token": ("allowed_token_ids", {"allowed_token_ids": []}),
    "bias that is text": ("logit_bias", {"logit_bias": {5: "much"}}),
    "bias nan": ("logit_bias", {"logit_bias": {5: math.nan}}),
    "bias huge": ("logit_bias", {"logit_bias": {5: 1e9}}),
    "bias that is a list": ("logit_bias", {"logit_bias": [5]}),
    "bad word that is a number": ("bad_words", {"bad_words": [5]}),
    "truncate 0": ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
}

BAD_FOR_THIS_MODEL = {
    "logprobs above max_logprobs": ("logprobs", {"logprobs": 21}),
    "prompt_logprobs above max_logprobs": ("prompt_logprobs", {"prompt_logprobs": 21}),
    "min_tokens above max_model_len": ("min_tokens", {"min_tokens": LENGTH, "max_tokens": None}),
    "bad word of spaces": ("bad_words", {"bad_words": [" "]}),
    "allowed id beyond the vocabulary": ("allowed_token_ids", {"allowed_token_ids": [5, VOCAB]}),
    "allowed id 2**31 - 1": ("allowed_token_ids", {"allowed_token_ids": [2**31 - 1]}),
    "bias of an id beyond the vocabulary": ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
    "bias of id 2**31 - 1": ("logit_bias", {"logit_bias": {2**31 - 1: 1.0}}),
    "stop token beyond the vocabulary": ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
}

BAD_IN_EVERY_ENGINE = {
    f"{name} {token}": (name, {name: {token: 1.0} if name == "logit_bias" else [token]})
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids")
    for token in (-1, 2**31, 2**63)
}


def named(table):
    return pytest.mark.parametrize("bad", table.values(), ids=table.keys())


def greedy(**changes):
    return SamplingParams(**({"max_tokens": 10, "temperature": 0, "ignore_eos": True} | changes))


@pytest.fixture(scope="module")
def expected(llm):
    """Return the tokens of the valid request when it runs alone."""
    return llm.generate(VICTIM, greedy())[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def engine(model_dir):
    llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model_dir, **OPTIONS))
    assert llm_engine.max_model_len == LENGTH
    yield llm_engine
    llm_engine.shutdown()


def check_llm(llm, expected, prompt, params, parameter):
    """Check that the error names the wrong parameter, and that valid requests succeed."""
    before, bad, after = llm.generate(
        [VICTIM, prompt, VICTIM], [greedy(), params, greedy()], on_error="return"
    )
    assert bad.outputs == [] and bad.finished and bad.error
    assert before.outputs[0].token_ids == after.outputs[0].token_ids == expected
    with pytest.raises(RequestError) as rejection:
        llm.generate([VICTIM, prompt], [greedy(), params])
    assert rejection.value.parameter == parameter and str(rejection.value).startswith("prompt 1: ")
    assert not llm.llm_engine.has_unfinished_requests()


def check_engine(engine, expected, prompt, params, parameter):
    """Check the error of an invalid request that arrives while a valid request runs."""
    engine.add_request("victim", VICTIM, greedy())
    for _ in range(3):
        engine.step()
    with pytest.raises(RequestError) as rejection:
        engine.add_request("bad", prompt, params)
    assert rejection.value.parameter == parameter
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {out.request_id for out in outputs} == {"victim"}
    assert outputs[-1].outputs[0].token_ids == expected


@pytest.mark.costly
@named(BAD_PROMPTS)
def test_invalid_prompts_are_rejected(llm, engine, expected, bad):
    check_llm(llm, expected, bad, greedy(), "prompt")
    check_engine(engine, expected, bad, greedy(), "prompt")


@pytest.mark.costly
@named(BAD_FOR_THIS_MODEL)
def test_parameters_that_the_model_does_not_support_are_rejected(llm, engine, expected, bad):
    parameter, changes = bad
    check_llm(llm, expected, VICTIM, greedy(**changes), parameter)
    check_engine(engine, expected, VICTIM, greedy(**changes), parameter)


@named(BAD_PARAMS | BAD_IN_EVERY_ENGINE)
def test_invalid_parameters_cannot_be_created(bad):
    parameter, changes = bad
    with pytest.raises(RequestError) as rejection:
        SamplingParams(**changes)
    assert rejection.value.parameter == parameter and parameter in str(rejection.value)
    assert len(str(rejection.value)) < 300


@pytest.mark.costly
@named(BAD_PARAMS | BAD_IN_EVERY_ENGINE)
def test_forged_parameters_are_rejected_by_the_engine(engine, llm, expected, bad):
    """A front end may create parameters without checks, or change them afterwards."""
    parameter, changes = bad
    params = greedy()
    for name, value in changes.items():
        object.__setattr__(params, name, value)
    forged = EngineCoreRequest(
        request_id="bad",
        prompt_token_ids=(5, 6),
        sampling_params=params,
        max_tokens=4,
    )
    core = engine.client.core
    engine.add_request("victim", VICTIM, greedy())
    engine.step()
    with pytest.raises(RequestError) as rejection:
        core.add_request(forged)
    assert rejection.value.parameter == parameter
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("field", "value", "parameter"),
    [
        *(("prompt_token_ids", (5, token), "prompt") for token in OUT_OF_RANGE),
        ("prompt_token_ids", (), "prompt"),
        ("prompt_token_ids", 7, "prompt"),
        ("prompt_token_ids", (5,) * LENGTH, "prompt"),
        ("max_tokens", 0, "max_tokens"),
        ("seed", -1, "seed"),
        ("stop_token_ids", frozenset({VOCAB}), "stop_token_ids"),
        ("bad_words_token_ids", ((VOCAB,),), "bad_words"),
    ],
)
def test_forged_requests_are_rejected_by_the_core(engine, expected, field, value, parameter):
    valid = EngineCoreRequest(
        request_id="bad", prompt_token_ids=(5, 6), sampling_params=greedy(), max_tokens=4
    )
    engine.add_request("victim", VICTIM, greedy())
    engine.step()
    with pytest.raises(RequestError) as rejection:
        engine.client.core.add_request(dataclasses.replace(valid, **{field: value}))
    assert rejection.value.parameter == parameter
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == expected


def test_text_parameters_are_rejected_without_a_tokenizer(model_dir, options):
    with LLM(model_dir, skip_tokenizer_init=True, **options) as bare:
        alone = bare.generate([[5, 6, 7]], greedy())[0].outputs[0].token_ids
        requests = {
            "prompt": ("text", greedy()),
            "bad_words": ([5], greedy(bad_words=["dog"])),
            "stop": ([5], greedy(stop="dog")),
        }
        for parameter, (prompt, params) in requests.items():
            check_llm_ids(bare, alone, prompt, params, parameter)
        with pytest.raises(RequestError, match="no tokenizer"):
            bare.chat([{"role": "user", "content": "hi"}])


def check_llm_ids(llm, alone, prompt, params, parameter):
    victim, bad = llm.generate([[5, 6, 7], prompt], [greedy(), params], on_error="return")
    assert bad.outputs == [] and parameter in bad.error and "tokenizer" in bad.error
    assert victim.outputs[0].token_ids == alone
