from array import array
from dataclasses import replace

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.input.input_processor import InputFacts, InputProcessor, completion_id
from dovetail.engine.input.prompt_reading import read_prompt
from dovetail.engine.input.request_checks import validate_core_request
from dovetail.errors import ConfigError, ModelError, RequestError
from dovetail.interfaces.sampling_support import FULL_SAMPLING
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

FACTS = InputFacts(vocab_size=259, max_model_len=32, eos_token_ids=frozenset({257}), max_logprobs=5)


def processor(tokenizer=True, **changes):
    return InputProcessor(
        replace(FACTS, **changes),
        tokenizer=ByteTokenizer() if tokenizer else None,
        clock=ManualClock(77),
    )


def one(prompt, tokenizer=True, info=None, **options):
    (request,) = processor(tokenizer, **(info or {})).process(
        "r", prompt, SamplingParams(**options)
    )
    return request


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", (256, 97, 98)),
        ({"prompt": "ab"}, (256, 97, 98)),
        ([97, 98], (97, 98)),
        ((97, 98), (97, 98)),
        (array("i", [97, 98]), (97, 98)),
        ({"prompt_token_ids": [97, 98]}, (97, 98)),
        ({"prompt_token_ids": [97, 98], "prompt": "text of these"}, (97, 98)),
    ],
)
def test_all_prompt_forms_are_accepted(prompt, ids):
    assert one(prompt).prompt_token_ids == ids


def test_extra_fields_of_a_prompt_are_kept():
    traits = {"cache_salt": "s", "tenant": "a", "deadline_s": 2.5}
    request = one({"prompt": "ab", **traits})
    assert (request.cache_salt, request.tenant) == ("s", "a")
    assert request.deadline_ns == 77 + 2_500_000_000
    bare = one("ab")
    assert (bare.cache_salt, bare.tenant, bare.deadline_ns) == ("", "", 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tenant", 5),
        ("cache_salt", None),
        ("deadline_s", 0),
        ("deadline_s", "soon"),
        ("deadline_s", True),
        ("deadline_s", float("nan")),
        ("deadline_s", float("inf")),
    ],
)
def test_extra_fields_of_a_prompt_are_checked(name, value):
    with pytest.raises(RequestError, match=name) as rejection:
        one({"prompt": "ab", name: value})
    assert rejection.value.parameter == name


def test_only_a_text_prompt_keeps_its_text():
    assert read_prompt("ab").text == read_prompt({"prompt": "ab"}).text == "ab"
    assert read_prompt([1]).text is read_prompt({"prompt_token_ids": [1]}).text is None


@pytest.mark.parametrize(
    ("prompt", "options", "parameter", "message"),
    [
        ([], {}, "prompt", "empty"),
        (None, {}, "prompt", "NoneType"),
        (5, {}, "prompt", "int"),
        (b"bytes", {}, "prompt", "bytes"),
        ({}, {}, "prompt", "NoneType"),
        ({"prompts": "a"}, {}, "prompt", "Did you mean 'prompt'"),
        ({"prompt": 3}, {}, "prompt", "int"),
        ([1, -1], {}, "prompt", "id -1.*0 to 258"),
        ([1, 259], {}, "prompt", "id 259.*0 to 258"),
        ([1, True], {}, "prompt", "True"),
        ([1, 2.0], {}, "prompt", "2.0"),
        ([1, "a"], {}, "prompt", "'a'"),
        ("a\ud800", {}, "prompt", "Unicode"),
        ([1] * 32, {}, "prompt", "32 tokens.*31 fit.*max_model_len=32"),
        ([1] * 30, {"min_tokens": 3, "max_tokens": 9}, "min_tokens", "leaves 2"),
        ([1], {"logit_bias": {259: 1.0}}, "logit_bias", "259"),
        ([1], {"allowed_token_ids": [4, 300]}, "allowed_token_ids", "300"),
        ([1], {"stop_token_ids": [300]}, "stop_token_ids", "300"),
        ([1], {"logprobs": 6}, "logprobs", "max_logprobs=5"),
        ([1], {"prompt_logprobs": 6}, "prompt_logprobs", "max_logprobs=5"),
        ([1], {"bad_words": [" "]}, "bad_words", "cannot encode"),
    ],
)
def test_the_error_for_an_invalid_request_names_the_parameter(prompt, options, parameter, message):
    with pytest.raises(RequestError, match=message) as rejection:
        one(prompt, **options)
    assert rejection.value.parameter == parameter


@pytest.mark.parametrize(
    ("prompt", "options", "parameter"),
    [
        ("text", {}, "prompt"),
        ([1], {"stop": "x"}, "stop"),
        ([1], {"bad_words": ["x"]}, "bad_words"),
    ],
)
def test_a_text_prompt_needs_a_tokenizer(prompt, options, parameter):
    with pytest.raises(RequestError, match="skip_tokenizer_init") as rejection:
        one(prompt, tokenizer=False, **options)
    assert rejection.value.parameter == parameter


def test_a_prompt_of_token_ids_needs_no_tokenizer():
    assert one([1], tokenizer=False).prompt_token_ids == (1,)


class MostlySpecial(ByteTokenizer):
    special_token_ids = frozenset(range(100, 259))


def test_bad_words_outside_of_a_small_vocabulary_are_rejected(caplog):
    info = replace(FACTS, vocab_size=100)
    small = InputProcessor(info, tokenizer=MostlySpecial(), clock=ManualClock(77))
    assert "ids up to 258" in caplog.text
    with pytest.raises(RequestError, match="120") as rejection:
        small.process("r", [1], SamplingParams(bad_words=["x"]))
    assert rejection.value.parameter == "bad_words"


@pytest.mark.parametrize("vocab_size", [100, 255])
def test_a_tokenizer_with_ids_beyond_the_models_vocabulary_is_rejected(vocab_size):
    with pytest.raises(
        ModelError, match=rf"ids up to 258.* has only {vocab_size} .*.*tokenizer.json"
    ):
        processor(vocab_size=vocab_size)


def test_a_tokenizer_with_a_smaller_vocabulary_is_accepted(caplog):
    assert processor(vocab_size=300).process("r", "a", SamplingParams())
    assert not caplog.text


def test_a_prompt_of_max_model_len_minus_one_tokens_gets_one_output_token():
    request = one([1] * 31, max_tokens=None)
    assert (len(request.prompt_token_ids), request.max_tokens) == (31, 1)


def test_prompt_truncation_keeps_the_last_tokens_and_precedes_the_length_check():
    request = one(list(range(100)), truncate_prompt_tokens=4)
    assert request.prompt_token_ids == (96, 97, 98, 99)


def test_max_tokens_defaults_to_the_remaining_length():
    assert one([1, 2], max_tokens=None).max_tokens == 30
    assert one([1, 2], max_tokens=5).max_tokens == 5
    assert one([1, 2], max_tokens=500).max_tokens == 30


def test_the_stop_tokens_of_a_request_include_eos():
    assert one([1], stop_token_ids=[3]).stop_token_ids == {3, 257}
    assert one([1], stop_token_ids=[3], ignore_eos=True).stop_token_ids == {3}


def test_bad_words_are_forbidden_with_and_without_a_leading_space():
    request = one([1], bad_words=["ab", " ab", "c"])
    assert set(request.bad_words_token_ids) == {(97, 98), (32, 97, 98), (99,), (32, 99)}
    assert len(request.bad_words_token_ids) == 4


def test_the_first_completion_uses_the_given_seed_and_the_others_use_derived_seeds():
    def seeds(seed, n=3):
        requests = processor().process("r", [1], SamplingParams(n=n, seed=seed))
        return [request.seed for request in requests]

    assert seeds(2**64 - 2)[0] == 2**64 - 2 and seeds(-1)[0] == 2**64 - 1
    assert seeds(7) == seeds(7) and seeds(7)[:2] == seeds(7, n=2)
    # Requests with different seeds never share a derived seed.
    actual = [seed for user_seed in range(100) for seed in seeds(user_seed, n=10)]
    assert len(set(actual)) == 1000


def test_derived_seeds_differ_and_are_repeatable():
    def seeds(engine_seed):
        inputs = processor(seed=engine_seed)
        return [r.seed for _ in range(3) for r in inputs.process("r", [1], SamplingParams(n=2))]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 12


def test_a_rejected_request_uses_no_sequence_number():
    inputs, other = processor(), processor()
    with pytest.raises(RequestError):
        inputs.process("r", [])
    assert inputs.process("r", [1])[0].seed == other.process("r", [1])[0].seed


def test_completions_share_the_prompt_and_have_separate_ids():
    requests = processor().process("r", "ab", SamplingParams(n=2), priority=4, cache_salt="s")
    assert [request.request_id for request in requests] == ["r#0", "r#1"]
    assert requests[0].prompt_token_ids is requests[1].prompt_token_ids
    for request in requests:
        assert (request.priority, request.cache_salt, request.arrival_ns) == (4, "s", 77)
    assert completion_id("r", 0, 1) == "r"


def test_a_request_without_parameters_gets_the_models_defaults():
    inputs = processor(default_sampling={"temperature": 0.5, "max_new_tokens": 3})
    (request,) = inputs.process("r", [1])
    assert request.sampling_params == inputs.default_params()
    assert (request.sampling_params.temperature, request.max_tokens) == (0.5, 3)
    with pytest.raises(RequestError, match="dict"):
        inputs.process("r", [1], {"n": 1})


@pytest.mark.parametrize("defaults", [{"temprature": 1.0}, {"top_p": 7.0}])
def test_invalid_default_sampling_parameters_are_configuration_errors(defaults):
    with pytest.raises(ConfigError, match="generation config"):
        processor(default_sampling=defaults)


GOOD = one("ab", seed=3, bad_words=["x"], stop_token_ids=[4])
SIZES = {"vocab_size": 259, "max_model_len": 32, "worker_provides": FULL_SAMPLING}


@pytest.mark.parametrize(
    ("field", "value", "parameter"),
    [
        ("request_id", "", "request_id"),
        ("request_id", 7, "request_id"),
        ("prompt_token_ids", (), "prompt"),
        ("prompt_token_ids", (1,) * 32, "prompt"),
        ("prompt_token_ids", (259,), "prompt"),
        ("prompt_token_ids", (-1,), "prompt"),
        ("prompt_token_ids", array("f", [1.0]), "prompt"),
        ("sampling_params", None, "sampling_params"),
        ("sampling_params", SamplingParams(logit_bias={259: 1}), "logit_bias"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", None, "max_tokens"),
        ("stop_token_ids", frozenset({259}), "stop_token_ids"),
        ("bad_words_token_ids", ((),), "bad_words"),
        ("bad_words_token_ids", ((1, 259),), "bad_words"),
        ("seed", 2**64, "seed"),
        ("seed", -1, "seed"),
        ("priority", "high", "priority"),
        ("arrival_ns", -5, "arrival_ns"),
        ("cache_salt", None, "cache_salt"),
    ],
)
def test_the_engine_checks_prompts_that_bypassed_the_front_end(field, value, parameter):
    validate_core_request(GOOD, **SIZES)
    with pytest.raises(RequestError) as rejection:
        validate_core_request(replace(GOOD, **{field: value}), **SIZES)
    assert rejection.value.parameter == parameter


def test_the_engine_checks_parameters_that_bypassed_the_front_end():
    params = SamplingParams()
    object.__setattr__(params, "top_p", float("nan"))
    with pytest.raises(RequestError, match="top_p"):
        validate_core_request(replace(GOOD, sampling_params=params), **SIZES)
