"""Random calls of the public front ends, with valid and hostile values of every parameter.

A call is a mapping of keyword arguments to functions that create the values when needed, so that
iterators are fresh and hypothesis does not copy large values.
"""

from __future__ import annotations

import itertools
import math
from enum import IntEnum

from hypothesis import strategies as st

from dovetail import SamplingParams
from dovetail.outputs import RequestOutputKind

VOCAB = 2048
HUGE_TEXT = "word " * 200_000
LONG_TEXT = "word " * 1000


class Raising:
    """A mapping that raises in every method."""

    def __repr__(self):
        raise OSError("no words")

    def __len__(self):
        raise OSError("no length")

    def __iter__(self):
        raise OSError("no items")

    def __eq__(self, other):
        raise OSError("no comparison")

    __hash__ = None


class RaisingList(list):
    __len__ = __iter__ = __getitem__ = Raising.__iter__


class RaisingDict(dict):
    items = keys = __iter__ = __getitem__ = get = Raising.__iter__


class Panic(BaseException):
    """An error like a panic in an extension module: it is not a subclass of Exception."""


def _panic(self, *values):
    raise Panic("hostile")


class HostileText(str):
    __len__ = __eq__ = __bool__ = __str__ = encode = isascii = _panic
    __hash__ = None


class HostileFloat(float):
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __float__ = __repr__ = _panic
    __hash__ = None


class WrongLengthList(list):
    def __len__(self):
        return 1


class EndlessList(list):
    def __iter__(self):
        return itertools.repeat(5)


class Number(IntEnum):
    ONE = 1


class Text(str):
    """A str subclass."""


def _cycle():
    value = []
    value.append(value)
    return value


# Values for any parameter. Each is created again for every call.
ODD_VALUES = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 0,
    lambda: 2**31,
    lambda: 2**63,
    lambda: -(2**63) - 1,
    lambda: 2**64,
    lambda: 10**5000,
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 1e308,
    lambda: 0.5,
    lambda: Number.ONE,
    lambda: "",
    lambda: "text",
    lambda: Text("text"),
    lambda: "\ud800",
    lambda: "a\0b",
    lambda: "é\U0001f600",
    lambda: HUGE_TEXT,
    lambda: LONG_TEXT,
    lambda: b"bytes",
    lambda: bytearray(b"bytes"),
    lambda: (),
    lambda: [],
    lambda: {},
    lambda: set(),
    lambda: {5},
    lambda: [5],
    lambda: [None],
    lambda: ["\ud800"],
    lambda: ["a", 5],
    lambda: [HUGE_TEXT],
    lambda: [5] * 300_000,
    lambda: [[[5]]],
    lambda: _cycle(),
    lambda: {"a": "\ud800"},
    lambda: {5: 5},
    lambda: {"a": object()},
    lambda: range(5, 10**9),
    lambda: range(3, 9),
    lambda: itertools.repeat(5),
    lambda: iter([5, 6]),
    lambda: (token for token in (5, 6)),
    lambda: object(),
    lambda: int,
    lambda: SamplingParams(),
    lambda: RequestOutputKind.DELTA,
)

BROKEN_VALUES = (
    Raising,
    lambda: RaisingList([5]),
    lambda: HostileText("text"),
    lambda: [HostileText("text")],
    lambda: HostileFloat(0.5),
    lambda: RaisingDict(a=1),
    lambda: WrongLengthList([5] * 5000),
    lambda: EndlessList([5]),
)
odd = st.one_of(st.sampled_from(ODD_VALUES), st.sampled_from(BROKEN_VALUES))


def fixed(*values):
    """Return a strategy that draws functions that create these values."""
    return st.sampled_from([lambda value=value: value for value in values])


def either(good, weight=4):
    """Return a strategy that draws `weight` valid values for each hostile value."""
    return st.integers(0, weight).flatmap(lambda number: good if number else odd)


_tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
_texts = st.text(alphabet="abc é—\n\0\U0001f600", min_size=1, max_size=30)
_words = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def made(strategy):
    """Return a strategy that draws functions that create the values of `strategy`."""
    return strategy.map(lambda value: lambda: value)


PARAM_FIELDS = {
    "n": fixed(1, 2, 3, 200),
    "temperature": fixed(0, 0.0, 0.7, 1, 100.0),
    "top_p": fixed(1e-9, 0.5, 1),
    "top_k": fixed(-1, 0, 1, 50, 2**31 - 1),
    "min_p": fixed(0, 0.1, 1.0),
    "presence_penalty": fixed(-2, 0.5, 2.0),
    "frequency_penalty": fixed(-2, 0.5, 2.0),
    "repetition_penalty": fixed(0.001, 1.1, 100),
    "seed": fixed(None, 0, -1, 2**64 - 1, -(2**63)),
    "stop": st.one_of(made(_words), fixed("a", None, ["x" * 1024])),
    "stop_token_ids": st.one_of(made(_tokens), fixed([5] * 100_000, list(range(VOCAB)))),
    "ignore_eos": fixed(True, False),
    "include_stop_str_in_output": fixed(True, False),
    "max_tokens": fixed(None, 1, 3, 2**31 - 1),
    "min_tokens": fixed(0, 1, 3, 2**31 - 1),
    "logprobs": fixed(None, 0, 1, 20, 1024),
    "prompt_logprobs": fixed(None, 0, 1, 20),
    "logit_bias": fixed({}, {5: 1}, {5: -100.0, 6: 100}, dict.fromkeys(range(VOCAB), 1.0)),
    "allowed_token_ids": st.one_of(made(_tokens), fixed([5] * 100_000, list(range(VOCAB)))),
    "bad_words": st.one_of(made(_words), fixed([f"w{index}" for index in range(500)])),
    "truncate_prompt_tokens": fixed(None, 1, 5, 2**31 - 1),
    "detokenize": fixed(True, False),
    "skip_special_tokens": fixed(True, False),
    "structured_outputs": fixed(None, {"form": "regex", "text": "[ab]+"}),
    "reasoning": fixed(None, {"end": "</think>"}),
    "extra_args": fixed({}, {"a": 1}, {"a": [1, {"b": None}], "c": 2**63}),
}
"""A strategy of valid values for each field of `SamplingParams`."""


@st.composite
def _params(rng):
    """Return a function that creates parameters with some fields. It may raise RequestError."""
    names = rng(st.lists(st.sampled_from(sorted(PARAM_FIELDS)), max_size=4, unique=True))
    makers = {name: rng(either(PARAM_FIELDS[name])) for name in names}

    def make():
        chosen = {name: maker() for name, maker in makers.items()}
        return SamplingParams(**{"max_tokens": 3, **chosen})

    return make


@st.composite
def _trait_prompt(rng):
    makers = {
        "prompt": rng(either(made(_texts))),
        "prompt_token_ids": rng(either(made(_tokens))),
        "cache_salt": rng(either(fixed("", "salt", "é"))),
        "tenant": rng(either(fixed("", "ada"))),
        "deadline_s": rng(either(fixed(None, 100, 1e8, 60.5))),
        "unknown": rng(odd),
    }
    names = rng(st.lists(st.sampled_from(sorted(makers)), max_size=4, unique=True))
    return lambda: {name: makers[name]() for name in names}


_large = fixed(HUGE_TEXT, LONG_TEXT, [5] * 100_000, range(10**9))
prompt = st.one_of(either(made(_texts)), either(made(_tokens)), _trait_prompt(), _large)
params = either(_params(), weight=9)

_content = either(made(_texts))


@st.composite
def _conversation(rng):
    several = []
    for _ in range(rng(st.integers(1, 3))):
        message = {"role": rng(either(fixed("user", "system", "assistant"), weight=6))}
        message["content"] = rng(either(made(_texts), weight=4))
        if rng(st.integers(0, 9)) == 0:
            message["extra"] = rng(odd)
        several.append(message)
    return lambda: [{key: maker() for key, maker in message.items()} for message in several]


conversation = either(_conversation())
TEMPLATES = fixed(None, None, None, "{{ messages }}", "{% for", "{{ 1/0 }}", "{{ nothing.at.all }}")

# For each front end: its parameters that are not part of the request.
GENERATE = {
    "use_tqdm": fixed(False, True),
    "priority": fixed(None, 5, [1, 2, 3], (0, 0, 0)),
    "on_error": fixed("return", "raise"),
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "f"}}
CHAT = {
    "chat_template": TEMPLATES,
    "chat_template_kwargs": fixed(None, {}, {"tools": [{"name": "f"}]}, {"a": 5}),
    "add_generation_prompt": fixed(True, False),
    "tools": fixed(None, [], TOOLS, TOOLS * 2, [{"type": "function"}], [{}] * 200, "f"),
    "tool_choice": fixed(None, "auto", "none", "required", NAMED, {}, "f"),
    "parallel_tool_calls": fixed(True, False),
    "use_tqdm": fixed(False, True),
    "on_error": fixed("return", "raise"),
}
STREAM = {
    "request_id": fixed("", "a", "a#0", "~1", "a~1", "x" * 1024),
    "priority": fixed(0, -5, 2**63 - 1),
    "cache_salt": fixed("", "salt"),
    "output_kind": fixed(*RequestOutputKind),
    "timeout_s": fixed(None, 60, 1e9, 0.5),
}


@st.composite
def arguments(rng, known):
    """Return a strategy that draws some arguments of `known`, as functions that create them."""
    names = rng(st.lists(st.sampled_from(sorted(known)), max_size=2, unique=True))
    return {name: rng(either(known[name], weight=4)) for name in names}


def make(makers):
    """Call the functions in a mapping that create values. Return the values."""
    return {name: maker() for name, maker in makers.items()}
