"""Checks the form of the conformance kit's messages: the violated rule as a sentence, then
details."""

from __future__ import annotations

import re

_DUMP = re.compile(r"[A-Z]\w+\(\w+=")
MAX_FIRST_LINE = 300


def expect_rule_first(error: BaseException) -> None:
    """Assert that the first line of a message is a sentence and not a dump of an object."""
    first = str(error).partition("\n")[0]
    assert first and len(first) <= MAX_FIRST_LINE, first
    assert not _DUMP.match(first), f"the message begins with a dump: {first}"
    assert "SchedulerStats(" not in str(error), f"the message dumps statistics: {error}"
