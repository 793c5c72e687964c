"""Texts of commands: counts, and messages in which values can be typed."""

import pytest

from dovetail.cli.frame.shell_text import shell_message
from dovetail.cli.terminal import count_text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 lines"), (1, "1 line"), (2, "2 lines"), (1000, "1,000 lines")]
)
def test_a_count_has_the_singular_only_for_one(number, text):
    assert count_text(number, "line") == text


@pytest.mark.parametrize("nothing", ["None", "null"])
def test_a_message_lists_only_values_that_can_be_typed(nothing):
    message = f"max_tokens=0 must be {nothing} or an integer from 1 to 5."
    assert shell_message(message) == "max_tokens=0 must be an integer from 1 to 5."
