"""The table itself: every id once, known statuses, links that lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from table import ROOT, STATUSES, read_features

IDS = {"P": 8, "E": 13, "S": 12, "W": 17, "M": 11, "D": 5, "A": 6}


def test_every_system_has_its_row() -> None:
    expected = [
        f"{letter}{number}" for letter, last in IDS.items() for number in range(1, last + 1)
    ]
    assert sorted(row.id for row in read_features()) == sorted(expected)


def test_a_claim_links_tests_that_are_there() -> None:
    for row in read_features():
        assert row.status in STATUSES, row
        assert bool(row.tests) == (row.status != "planned"), f"{row.id} claims without a test"
        for test in row.tests:
            path, _, name = test.partition("::")
            source = (ROOT / path).read_text("utf-8")
            assert re.search(rf"^def {name}\(", source, re.M), f"{row.id}: {test} is not there"


def test_rows_are_read_from_text() -> None:
    row = "| X1 | thing | works | `a/test_b.py::test_c` | worker, executor |"
    (feature,) = read_features(row)
    assert (feature.tests, feature.fakes) == (("a/test_b.py::test_c",), ("worker", "executor"))
