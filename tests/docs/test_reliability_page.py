"""docs/reliability.md lists every fault point, and the tests that it names exist."""

import re
from pathlib import Path

from docs.fault_matrix import (
    NOT_RUN,
    PAGE,
    ROOT,
    actions,
    merged,
    read_page,
    read_reports,
    render,
    summary,
)
from docs.policy_facts import recorded

from dovetail.faults import POINTS

ADVICE = "run `python tests/docs/record_reliability.py`"


def test_the_fault_matrix_has_a_row_for_each_fault_point():
    text, matrix = PAGE.read_text("utf-8"), read_page()
    assert recorded(text, "faults") == render(matrix), ADVICE
    assert recorded(text, "summary") == summary(matrix), ADVICE
    assert set(matrix) == set(POINTS)


def test_no_fault_in_the_recorded_matrix_has_failed():
    failed = [(p, a) for p, row in read_page().items() for a in row if row[a] == "failed"]
    assert not failed


def test_the_tests_that_the_reliability_page_names_exist():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text("utf-8"))
    assert len(named) >= 8
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text("utf-8"), f"{path}::{test}"


def test_pytest_reports_are_read_and_merged(tmp_path: Path):
    name = "test_every_fault_is_reported_without_hangs_or_leaks"
    case = f'<testcase classname="x" name="{name}[{{}}]" time="1.26"'
    cases = (
        case.format("core.launch-kill") + "/>",
        case.format("core.launch-exit=3") + "><failure/></testcase>",
        case.format("core.update-raise") + "><skipped/></testcase>",
        case.format("core.gone-raise") + "/>",
        '<testcase name="test_another" time="1"/>',
    )
    (tmp_path / "a.xml").write_text(f"<testsuites>{''.join(cases)}</testsuites>")
    actual = read_reports([tmp_path / "a.xml"])
    assert actual["core.launch"]["kill"] == "1.3 s"
    assert actual["core.launch"]["exit=3"] == "failed"
    assert actual["core.update"] == dict.fromkeys(actions(), NOT_RUN)
    assert "1 passed, 1 failed" in summary(actual)
    later = read_reports([])
    later["core.launch"]["exit=3"] = "0.5 s"
    both = merged(actual, later)
    assert (both["core.launch"]["kill"], both["core.launch"]["exit=3"]) == ("1.3 s", "0.5 s")
