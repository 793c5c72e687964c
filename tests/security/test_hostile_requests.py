"""Every front end rejects hostile values in any part of a request with the same message.

A valid request that runs at the same time must have the same tokens as alone.
"""

from __future__ import annotations

import array
import itertools
import math

import pytest
from security.engines import MAX_MODEL_LEN, engine_options, open_front_end, open_llm

from dovetail import SamplingParams
from dovetail.errors import RequestError
from dovetail.value_checks import shorten

pytestmark = pytest.mark.costly  # the tests share servers

SURROGATE = "\ud800"
HUGE = "x" * 70_000_000
LONG_LIST = [5] * 10**7
KINDS = ("in process", "engine process", "async")
VALID = {"prompt": "a valid request", "params": SamplingParams(max_tokens=6, seed=3)}


class WrongLengthList(list):
    """A list that reports the length 1, but has many items."""

    def __len__(self):
        return 1


class HugeLengthList(list):
    """A list that reports a huge length, but has few items."""

    def __len__(self):
        return 10**12


class RaisingList(list):
    def __len__(self):
        raise OSError("no length")

    def __iter__(self):
        raise OSError("no items")


class RaisesInRepr:
    def __repr__(self):
        raise OSError("no words")


class RaisingMapping(dict):
    def items(self):
        raise OSError("no items")


def endless():
    return itertools.repeat(5)


def nested(depth):
    value = "end"
    for _ in range(depth):
        value = [value]
    return value


# An argument added to a valid prompt and parameters, and the parameter that the error must name.
HOSTILE_ARGUMENTS = {
    "id with a surrogate": ("request_id", {"request_id": f"a{SURROGATE}"}),
    "id of 70 MB": ("request_id", {"request_id": HUGE}),
    "id above the limit": ("request_id", {"request_id": "x" * 1025}),
    "id that is bytes": ("request_id", {"request_id": b"a"}),
    "id that cannot be shown": ("request_id", {"request_id": RaisesInRepr()}),
    "salt with a surrogate": ("cache_salt", {"cache_salt": SURROGATE}),
    "salt of 70 MB": ("cache_salt", {"cache_salt": HUGE}),
    "salt that is None": ("cache_salt", {"cache_salt": None}),
    "priority of 65 bits": ("priority", {"priority": 2**63}),
    "priority of 20,000 digits": ("priority", {"priority": 10**20_000}),
    "priority that is a bool": ("priority", {"priority": True}),
    "priority nan": ("priority", {"priority": math.nan}),
    "output kind as text": ("output_kind", {"output_kind": "delta"}),
    "params as a mapping": ("params", {"params": {"n": 1}}),
    "params that cannot be shown": ("params", {"params": RaisesInRepr()}),
}
HOSTILE_PROMPTS = {
    "surrogate": ("prompt", f"a{SURROGATE}b"),
    "10 MB": ("prompt", "word " * 2_000_000),
    "range of a billion": ("prompt", range(5, 10**9)),
    "endless iterator": ("prompt", endless()),
    "list with a wrong length": ("prompt", WrongLengthList([5] * (MAX_MODEL_LEN + 1))),
    "list that raises": ("prompt", RaisingList([5])),
    "set of ids": ("prompt", {5, 6}),
    "bytes": ("prompt", b"abc"),
    "memory": ("prompt", memoryview(b"abc")),
    "ids of 5,000 digits": ("prompt", [5, 10**5000]),
    "ids nan": ("prompt", [math.nan]),
    "object without a repr": ("prompt", [RaisesInRepr()]),
    "mapping that raises": ("prompt", RaisingMapping(prompt="a")),
    "mapping with odd keys": ("prompt", {5: "a"}),
    "prompt text that is not text, with ids": ("prompt", {"prompt": 5, "prompt_token_ids": [5]}),
    "text instead of ids": ("prompt_token_ids", {"prompt_token_ids": HUGE}),
    "two prompt texts": ("prompt_token_ids", {"prompt": "a", "prompt_token_ids": HUGE}),
    "prompt text of 70 MB, with ids": ("prompt", {"prompt": HUGE, "prompt_token_ids": [5]}),
    "tenant with a surrogate": ("tenant", {"prompt": "a", "tenant": SURROGATE}),
    "tenant of 70 MB": ("tenant", {"prompt": "a", "tenant": HUGE}),
    "salt of 70 MB in the prompt": ("cache_salt", {"prompt": "a", "cache_salt": HUGE}),
    "deadline of 5,000 digits": ("deadline_s", {"prompt": "a", "deadline_s": 10**5000}),
    "deadline nan": ("deadline_s", {"prompt": "a", "deadline_s": math.nan}),
}
HOSTILE_PARAMS = {
    "stop with a surrogate": ("stop", {"stop": [SURROGATE]}),
    "stop of 70 MB": ("stop", {"stop": HUGE}),
    "stop that is a number": ("stop", {"stop": 5}),
    "stop that raises": ("stop", {"stop": RaisingList(["a"])}),
    "bad word with a surrogate": ("bad_words", {"bad_words": [f"a{SURROGATE}"]}),
    "bad word of 6 MB": ("bad_words", {"bad_words": ["x" * 6_000_000]}),
    "too many bad words": ("bad_words", {"bad_words": ["a"] * 4097}),
    "bad words with a wrong length": ("bad_words", {"bad_words": WrongLengthList(["a"] * 5000)}),
    "ten million stop ids": ("stop_token_ids", {"stop_token_ids": LONG_LIST}),
    "ten million allowed ids": ("allowed_token_ids", {"allowed_token_ids": LONG_LIST}),
    "stop ids that raise": ("stop_token_ids", {"stop_token_ids": RaisingList([1])}),
    "stop ids as text": ("stop_token_ids", {"stop_token_ids": "123"}),
    "stop id of 5,000 digits": ("stop_token_ids", {"stop_token_ids": [10**5000]}),
    "bias that raises": ("logit_bias", {"logit_bias": RaisingMapping({1: 1.0})}),
    "bias of a huge number": ("logit_bias", {"logit_bias": {1: 10**5000}}),
    "bias of a bool": ("logit_bias", {"logit_bias": {True: 1.0}}),
    "extra args of 70 MB": ("extra_args", {"extra_args": {"a": HUGE}}),
    "extra args with a surrogate": ("extra_args", {"extra_args": {"a": [SURROGATE]}}),
    "extra args of 65 bits": ("extra_args", {"extra_args": {"a": 2**64}}),
    "extra args nested a thousand deep": ("extra_args", {"extra_args": {"a": nested(1000)}}),
    "extra args with an object": ("extra_args", {"extra_args": {"a": RaisesInRepr()}}),
    "extra args with a number as key": ("extra_args", {"extra_args": {5: "a"}}),
    "extra args that raise": ("extra_args", {"extra_args": RaisingMapping(a=1)}),
    "bool that is text": ("ignore_eos", {"ignore_eos": "yes"}),
    "seed of 5,000 digits": ("seed", {"seed": 10**5000}),
    "temperature of 5,000 digits": ("temperature", {"temperature": 10**5000}),
}
# Valid for every engine, but above the limits of this one.
OVER_THE_LIMITS = {
    "stop string above the limit": ("stop", {"stop": "x" * 1025}),
    "bad word above the limit": ("bad_words", {"bad_words": ["x" * 257]}),
    "bad words above the common limit": ("bad_words", {"bad_words": ["x" * 200] * 1000}),
    "extra args above the limit": ("extra_args", {"extra_args": {"a": "x" * 70_000}}),
    "stop id beyond the vocabulary": ("stop_token_ids", {"stop_token_ids": [300]}),
    "bias beyond the vocabulary": ("logit_bias", {"logit_bias": {2**30: 1.0}}),
}


@pytest.fixture(scope="module", params=KINDS)
def front_end(request, tmp_path_factory):
    opened = open_front_end(request.param, engine_options(tmp_path_factory.mktemp("model")))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def refusals():
    """Maps each case to the message that the first tested front end gives."""
    return {}


def hostile_requests():
    for name, (parameter, arguments) in HOSTILE_ARGUMENTS.items():
        yield name, parameter, {"prompt": "a", "params": VALID["params"]} | arguments
    for name, (parameter, prompt) in HOSTILE_PROMPTS.items():
        yield name, parameter, {"prompt": prompt, "params": VALID["params"]}
    for name, (parameter, params) in OVER_THE_LIMITS.items():
        yield name, parameter, {"prompt": "a", "params": SamplingParams(**params)}


def tokens_of(output):
    assert not isinstance(output, Exception), repr(output)
    return [completion.token_ids for completion in output.outputs]


def test_the_error_for_a_hostile_value_names_it_and_valid_requests_continue(front_end, refusals):
    (alone,) = front_end.ask_all([{"request_id": "alone"} | VALID])
    expected = tokens_of(alone)
    for name, parameter, arguments in hostile_requests():
        hostile = {"request_id": "hostile"} | arguments
        before, rejected, after = front_end.ask_all(
            [{"request_id": "before"} | VALID, hostile, {"request_id": "after"} | VALID]
        )
        assert isinstance(rejected, RequestError), (name, rejected)
        assert rejected.parameter == parameter, (name, rejected)
        assert len(str(rejected)) < 400, name
        assert tokens_of(before) == tokens_of(after) == expected, name
        # Every front end gives the same message.
        assert refusals.setdefault(name, str(rejected)) == str(rejected)


@pytest.mark.parametrize(("parameter", "arguments"), HOSTILE_PARAMS.values(), ids=HOSTILE_PARAMS)
def test_sampling_parameters_with_hostile_values_cannot_be_created(parameter, arguments):
    with pytest.raises(RequestError) as rejected:
        SamplingParams(**arguments)
    assert rejected.value.parameter == parameter
    assert parameter in str(rejected.value) and len(str(rejected.value)) < 300


def test_valid_values_of_unusual_types_are_accepted(front_end):
    prompts = (range(5, 9), array.array("i", [5, 6, 7, 8]), HugeLengthList([5, 6, 7, 8]))
    prompts += (iter([5, 6, 7, 8]), (5, 6, 7, 8), {"prompt_token_ids": [5, 6, 7, 8]})
    params = VALID["params"]
    requests = [
        {"request_id": f"odd~{index}#{index}", "prompt": prompt, "params": params}
        for index, prompt in enumerate(prompts)
    ]
    actual = [tokens_of(output) for output in front_end.ask_all(requests)]
    assert actual == [actual[0]] * len(prompts)


def test_request_ids_may_look_like_internal_ids(front_end):
    """Internal ids of a request's completions do not collide with ids of other requests."""
    names = ["a", "a#0", "a#1", "a~1", "a~1#0", "~1", "~2", "#", "\0", "é", "a\n", " "]
    several = SamplingParams(max_tokens=4, seed=1, n=2)
    requests = [{"request_id": name, "prompt": "p", "params": several} for name in names]
    actual = front_end.ask_all(requests)
    assert [output.request_id for output in actual] == names
    assert [tokens_of(output) for output in actual] == [tokens_of(actual[0])] * len(names)


def test_repeated_token_ids_in_sampling_parameters_are_removed():
    params = SamplingParams(stop_token_ids=[7, 5, 7] * 100_000, allowed_token_ids=[1] * 1000)
    assert params.stop_token_ids == (7, 5) and params.allowed_token_ids == (1,)


def test_sampling_parameters_copy_their_arguments_at_creation():
    extra, biases = {"a": [1, {"b": (2,)}]}, {1: 2}
    params = SamplingParams(extra_args=extra, logit_bias=biases)
    extra["a"].append(object())
    biases[5] = "much"
    assert params.extra_args == {"a": [1, {"b": [2]}]} and params.logit_bias == {1: 2.0}


# --- lists of prompts, conversations ----------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS[:2])
def llm(request, tmp_path_factory):
    options = engine_options(tmp_path_factory.mktemp("model"), max_prompts=1000)
    with open_llm(request.param, options) as opened_llm:
        yield opened_llm


@pytest.mark.parametrize(
    ("prompts", "parameter"),
    [
        (range(5, 10**9), "prompt"),
        (endless(), "prompt"),
        (LONG_LIST, "prompt"),
        (itertools.repeat("again"), "prompts"),
        (["again"] * 1001, "prompts"),
        (RaisingList(["a"]), "prompts"),
        (WrongLengthList(["a"] * 2000), "prompts"),
        ({"a", "b"}, "prompt"),
        (b"bytes", "prompt"),
        (5, "prompt"),
        (None, "prompt"),
        ([iter([5]), endless()], "prompt"),
    ],
    ids=range(12),
)
def test_prompts_that_are_not_a_list_are_rejected_without_reading_them(llm, prompts, parameter):
    with pytest.raises(RequestError) as rejected:
        llm.generate(prompts, VALID["params"])
    assert rejected.value.parameter == parameter
    (output,) = llm.generate("a valid request", VALID["params"])
    assert output.error is None


def test_prompts_may_come_from_any_iterable(llm):
    params = VALID["params"]
    listed = [output.outputs for output in llm.generate(["a", "b"], params)]
    assert [item.outputs for item in llm.generate((text for text in "ab"), params)] == listed
    assert [item.outputs for item in llm.generate(dict.fromkeys("ab").keys(), params)] != []
    tokens = llm.generate([5, 6, 7], params)
    assert [item.outputs for item in llm.generate(range(5, 8), params)] == [tokens[0].outputs]
    assert [item.outputs for item in llm.generate(iter([5, 6, 7]), params)] == [tokens[0].outputs]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_error", "ignore"),
        ("on_error", None),
        ("use_tqdm", "yes"),
        ("priority", "high"),
        ("sampling_params", [VALID["params"]] * 2),
        ("sampling_params", "hot"),
    ],
)
def test_invalid_arguments_of_generate_are_rejected(llm, name, value):
    with pytest.raises(RequestError) as rejected:
        llm.generate("a", **{name: value})
    assert rejected.value.parameter == name and name in str(rejected.value)


USER = {"role": "user", "content": "hello"}
IMAGE = {"type": "image_url", "image_url": {}}


@pytest.mark.parametrize(
    ("parameter", "arguments"),
    [
        ("messages", {"messages": "hello"}),
        ("messages", {"messages": []}),
        ("messages[1]", {"messages": [USER, "hello"]}),
        ("messages[1]", {"messages": [[USER], "hello"]}),
        ("messages[1][1]", {"messages": [[USER], [USER, "hello"]]}),
        ("messages", {"messages": [USER] * 5000}),
        ("messages", {"messages": [{"role": "user", "content": HUGE}]}),
        ("messages", {"messages": [{"role": "user", "content": SURROGATE}]}),
        ("messages", {"messages": [{"role": "user", "content": RaisesInRepr()}]}),
        ("messages[0].role", {"messages": [{"role": 5, "content": "a"}]}),
        ("messages[0].role", {"messages": [{"content": "a"}]}),
        ("messages[1].role", {"messages": [USER, {"role": "bob", "content": "a"}]}),
        ("messages[0].role", {"messages": [{"role": HUGE[:9999], "content": "a"}]}),
        ("messages[1][0].role", {"messages": [[USER], [{"role": "bob", "content": "a"}]]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [5]}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("messages", {"messages": RaisingList([USER])}),
        ("messages", {"messages": itertools.repeat(USER)}),
        ("chat_template", {"messages": [USER], "chat_template": 5}),
        ("chat_template_kwargs", {"messages": [USER], "chat_template_kwargs": 5}),
        ("chat_template_kwargs", {"messages": [USER], "chat_template_kwargs": {"messages": []}}),
        (
            "chat_template_kwargs",
            {"messages": [USER], "chat_template_kwargs": {"a": RaisesInRepr()}},
        ),
        ("add_generation_prompt", {"messages": [USER], "add_generation_prompt": "yes"}),
    ],
    ids=shorten,
)
def test_invalid_conversations_are_rejected(llm, parameter, arguments):
    with pytest.raises(RequestError) as rejected:
        llm.chat(**arguments)
    assert rejected.value.parameter == parameter and len(str(rejected.value)) < 400
    assert llm.chat([USER], VALID["params"])[0].error is None


def test_a_failed_call_does_not_affect_a_request_with_the_same_id(llm):
    """`LLM` numbers its requests. A user's own request may have the next number as its id."""
    engine = llm.llm_engine
    number = str(int(llm.generate("a", VALID["params"])[0].request_id) + 1)
    engine.add_request(number, "mine", SamplingParams(max_tokens=50, ignore_eos=True))
    with pytest.raises(RequestError, match="in use"):
        llm.generate("a", VALID["params"])
    ended = []
    while engine.has_unfinished_requests():
        ended += [output for output in engine.step() if output.finished]
    assert [(item.request_id, len(item.outputs[0].token_ids)) for item in ended] == [(number, 50)]


# --- limits -----------------------------------------------------------------------------------


def test_limits_of_requests_can_be_changed_by_options(tmp_path):
    options = engine_options(
        tmp_path,
        max_prompt_chars=20,
        max_id_chars=5,
        max_stop_strings=1,
        max_stop_chars=3,
        max_bad_words=2,
        max_bad_word_chars=4,
        max_bad_words_chars=6,
        max_extra_args_bytes=30,
    )
    rejected = [
        ("prompt", {"prompt": "x" * 21}),
        ("request_id", {"request_id": "123456"}),
        ("tenant", {"prompt": {"prompt": "a", "tenant": "123456"}}),
        ("cache_salt", {"cache_salt": "123456"}),
        ("stop", {"params": SamplingParams(stop=["a", "b"])}),
        ("stop", {"params": SamplingParams(stop="abcd")}),
        ("bad_words", {"params": SamplingParams(bad_words=["a", "b", "c"])}),
        ("bad_words", {"params": SamplingParams(bad_words=["abcde"])}),
        ("bad_words", {"params": SamplingParams(bad_words=["abcd", "abc"])}),
        ("extra_args", {"params": SamplingParams(extra_args={"a": "x" * 30})}),
    ]
    served = {
        "params": SamplingParams(max_tokens=1, stop="abc", extra_args={"a": 1}),
        "prompt": {"prompt": "x" * 20, "tenant": "12345"},
    }
    front_end = open_front_end("in process", options)
    try:
        for parameter, arguments in rejected:
            base = {"request_id": "a", "prompt": "a", "params": SamplingParams(max_tokens=1)}
            (error,) = front_end.ask_all([base | arguments])
            assert isinstance(error, RequestError) and error.parameter == parameter, arguments
        (output,) = front_end.ask_all([{"request_id": "12345"} | served])
        assert output.finished
    finally:
        front_end.close()
