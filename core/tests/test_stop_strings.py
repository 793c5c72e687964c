import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.engine.output.stop_strings import StopStringFilter


def run(stops, pieces, include=False):
    stream = StopStringFilter(stops, include_stop_str_in_output=include)
    shown = ""
    for piece in pieces:
        new, stop = stream.push(piece)
        shown += new
        if stop is not None:
            return shown, stop
    return shown + stream.flush(), None


def by_characters(stops, text, include=False):
    """Return the expected result: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("pieces", "shown", "stop"),
    [
        (["Hello", " wor", "ld"], "Hello world", None),
        (["one\n\nHu", "man: two"], "one", "\n\nHuman:"),
        (["one\n", "\n", "Hum", "an", ":", " two"], "one", "\n\nHuman:"),
        (["one\n\n", "Humbug"], "one\n\nHumbug", None),
        (["END"], "", "END"),
        (["aEN", "EN", "D"], "aEN", "END"),
    ],
)
def test_stop_strings_are_found_across_chunk_boundaries(pieces, shown, stop):
    assert run(["\n\nHuman:", "END"], pieces) == (shown, stop)


def test_only_a_possible_stop_string_prefix_is_held_back():
    stream = StopStringFilter(["<end>"])
    assert stream.push("abc<e") == ("abc", None)
    assert stream.push("n") == ("", None)
    assert stream.push("x<") == ("<enx", None)
    assert stream.flush() == "<"


def test_the_stop_string_is_shown_when_requested():
    assert run(["b", "bc"], ["a", "bcd"], include=True) == ("ab", "b")


def test_the_longest_of_the_earliest_stop_string_matches_is_used():
    assert run(["abcdef", "bcd"], ["abcdef"]) == ("a", "bcd")
    assert run(["cd", "bcd"], ["abcdef"]) == ("a", "bcd")


def test_a_stop_string_can_begin_before_min_tokens():
    stream = StopStringFilter(["stop", "to"])
    assert stream.push("stop s", armed=False) == ("stop ", None)
    assert stream.push("to", armed=False) == ("", None)
    assert stream.push("p") == ("", "stop")


def test_similar_long_stop_strings_are_compared_in_limited_time():
    """Their comparison must not delay the tokens of other requests."""
    stops = ["a" * 512 + chr(98 + number) + "a" * 511 for number in range(63)] + ["a" * 1023 + "b"]
    stream = StopStringFilter(stops)
    begin = time.process_time()
    shown = "".join(stream.push("aaaa")[0] for _ in range(1500))
    assert time.process_time() - begin < 1
    assert shown + stream.flush() == "a" * 6000


@pytest.mark.parametrize("stops", [[], ["a", ""]])
def test_empty_stop_strings_are_rejected(stops):
    with pytest.raises(ValueError, match="no empty string"):
        StopStringFilter(stops)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab<", max_size=4), max_size=8),
    st.booleans(),
)
def test_stop_string_results_do_not_depend_on_the_chunk_sizes(stops, pieces, include):
    assert run(stops, pieces, include) == by_characters(stops, "".join(pieces), include)
