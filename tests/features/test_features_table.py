"""The features table has unique ids, known statuses and existing tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import wiring_trial
from prove import misplaced_faults
from table import ROOT, STATUSES, read_features
from wiring_trial import WiringFault, read_faults

IDS = {"P": 9, "E": 19, "S": 13, "W": 19, "M": 13, "D": 7, "A": 6}


def test_every_part_of_the_engine_has_a_row_in_the_features_table() -> None:
    expected = [
        f"{letter}{number}" for letter, last in IDS.items() for number in range(1, last + 1)
    ]
    assert sorted(row.id for row in read_features()) == sorted(expected)


def test_each_claimed_feature_links_existing_tests() -> None:
    for row in read_features():
        assert row.status in STATUSES, row
        assert bool(row.tests) == (row.status != "planned"), f"{row.id} claims without a test"
        for test in row.tests:
            path, _, name = test.partition("::")
            source = (ROOT / path).read_text("utf-8")
            assert re.search(rf"^def {name}\(", source, re.M), f"{row.id}: {test} does not exist"


def test_rows_are_parsed_from_the_text_of_a_table() -> None:
    row = "| X1 | thing | works | `a/test_b.py::test_c` | worker, executor |"
    (feature,) = read_features(row)
    assert (feature.tests, feature.fakes) == (("a/test_b.py::test_c",), ("worker", "executor"))


def test_each_claimed_feature_has_a_fault_that_applies_to_the_code() -> None:
    assert misplaced_faults(read_features(), read_faults()) == []


def test_faults_that_do_not_fit_the_table_or_the_code_are_reported() -> None:
    features = read_features("| X1 | thing | works | `a.py::one` | direct |")
    elsewhere = WiringFault(
        feature="X1", name="wrong", path="nothing.py", right="a", wrong="b", test="a.py::two[3]"
    )
    assert misplaced_faults(features, ()) == [
        "X1: has no fault that tests its wiring; add one to tests/features/wiring_faults.toml"
    ]
    row, line = misplaced_faults(features, [elsewhere])
    assert row == "X1: the row does not link a.py::two[3]"
    assert "'a' occurs 0 times in nothing.py" in line


def test_a_copy_of_the_repository_has_its_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, tree = tmp_path / "root", tmp_path / "tree"
    monkeypatch.setattr(wiring_trial, "ROOT", root)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "compiled"))
    compiled = [wiring_trial.bytecode_folder(folder) / "a.pyc" for folder in (root, tree)]
    for file in (root / "a.py", compiled[0]):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
    wiring_trial.copy_tree(tree)
    assert (tree / "a.py").samefile(root / "a.py") and compiled[1].samefile(compiled[0])


TRIALS = """
import sys
sys.path.insert(0, "tests/features")
from wiring_trial import WiringFault, try_faults

change = {"path": "core/src/dovetail/rows.py", "right": "if num_rows < 1:", "wrong": "if False:"}
tests = [
    "test_a_row_allocator_needs_at_least_one_row",
    "test_an_allocation_without_a_free_row_fails",
    "test_that_is_not_there",
]
faults = [
    WiringFault(feature="X1", name=name, test=f"core/tests/test_rows.py::{name}", **change)
    for name in tests
]
for fault, verdict in sorted(try_faults(faults), key=lambda tried: tried[1]):
    print(fault.name, verdict)
"""


@pytest.mark.costly
def test_a_fault_is_tried_in_a_copy_of_the_repository() -> None:
    source = ROOT / "core/src/dovetail/rows.py"
    before = source.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", TRIALS], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        "test_that_is_not_there broken",
        "test_a_row_allocator_needs_at_least_one_row failed",
        "test_an_allocation_without_a_free_row_fails passed",
    ], done.stderr
    assert source.read_bytes() == before
