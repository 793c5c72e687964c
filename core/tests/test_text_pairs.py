"""The pairs of strings that a model scores: limits and errors of the arguments."""

import itertools

import pytest

from dovetail.engine.output.scoring import read_pairs
from dovetail.errors import RequestError


class Endless(list):
    """A list whose iterator never ends."""

    def __iter__(self):
        return itertools.repeat("a")


class Failing(list):
    """A list whose iterator fails."""

    def __iter__(self):
        raise ZeroDivisionError("by zero")


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["a"] * 4, r"has 4 strings; at most 3 are accepted \(max_prompts\)"),
        ([5] * 4, r"has 4 strings; at most 3 are accepted \(max_prompts\)"),
        (Endless(), r"has more than 3 strings; at most 3 are accepted \(max_prompts\)"),
        (Failing(), "cannot be read: ZeroDivisionError"),
        (5, "must be a string or a list of strings"),
    ],
    ids=["too many", "too many numbers", "endless", "failing", "number"],
)
@pytest.mark.parametrize("name", ["queries", "documents"])
def test_an_argument_that_cannot_be_read_is_rejected_with_its_name(name, value, message, is_strict):
    arguments = {"queries": "a", "documents": ["a"], name: value}
    with pytest.raises(RequestError, match=f"{name} {message}") as caught:
        read_pairs(**arguments, max_texts=3, is_strict=is_strict)
    assert caught.value.parameter == name


def test_only_pairs_with_other_entries_than_strings_have_errors():
    pairs = read_pairs("a", ["b", 5, "c"], max_texts=3, is_strict=False)
    assert pairs.valid == [0, 2] and str(pairs.errors[1]) == "documents[1] must be a string."
    assert pairs.texts() == {"a": "queries", "b": "documents[0]", "c": "documents[2]"}
    with pytest.raises(RequestError, match=r"documents\[1\] must be a string"):
        read_pairs("a", ["b", 5, "c"], max_texts=3)
