"""The record of a complete run contains all outcomes and becomes invalid when a file changes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import prove
import suite
from features.small_tree import SETTINGS, commit
from prove import SAMPLED as SAMPLED_FAULTS
from prove import sample_of, unproven
from table import ROOT, read_features
from wiring_trial import read_faults

TESTS = """
import os, time, pytest

@pytest.mark.parametrize("number", [1, 2])
def test_some(number):
    assert number == 1

def test_quick():
    assert "PYTEST_XDIST_WORKER" in os.environ

@pytest.mark.clock
def test_alone():
    assert "PYTEST_XDIST_WORKER" not in os.environ

@pytest.mark.costly
@pytest.mark.parametrize("number", [1, 2])
def test_costly_one(number):
    pass

@pytest.mark.costly
def test_costly_two():
    pass

@pytest.mark.slow
def test_long():
    pass

def test_left_out():
    pytest.skip("not here")
"""
UNSTABLE = """
import os, pytest
from pathlib import Path

@pytest.mark.parametrize("number", range(2))
def test_unstable(number):
    failed = Path(__file__).with_name(f"failed_{Path(__file__).stem}_{number}")
    if not failed.exists():
        failed.touch()
        assert False

def test_stable():
    assert "PYTEST_XDIST_WORKER" in os.environ
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a git checkout of a few files, which replaces the repository in these tests."""
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "RECORD", tmp_path / "cache" / "suite.json")
    monkeypatch.setitem(suite.PARTS, "--clock=without", ("-n", "1", "--dist", "loadfile"))
    (tmp_path / ".gitignore").write_text("cache\n__pycache__\nfailed_*\n")
    (tmp_path / "code.py").write_text("x = 1\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.costly
def test_every_change_of_a_file_changes_the_digest_of_the_tree(tree: Path) -> None:
    assert suite.tree_state() == ""  # the repository has no commit yet
    commit(tree)
    first = suite.tree_state()
    (tree / "cache").mkdir()
    (tree / "cache" / "ignored").write_text("1")
    assert first == suite.tree_state() != ""
    states = [first]
    (tree / "code.py").write_text("x = 2\n")
    states.append(suite.tree_state())
    (tree / "code.py").rename(tree / "moved.py")
    states.append(suite.tree_state())
    (tree / "new.py").touch()
    states.append(suite.tree_state())
    commit(tree)
    states.append(suite.tree_state())
    assert len(set(states)) == len(states)


def test_a_test_record_is_valid_until_a_file_changes(tree: Path) -> None:
    commit(tree)
    assert suite.recorded() is None
    suite.RECORD.parent.mkdir()
    content = {"state": suite.tree_state(), "outcomes": {"test_a.py::test_b": ["passed"]}}
    suite.RECORD.write_text(json.dumps(content))
    assert suite.recorded() == {"test_a.py::test_b": {"passed"}}
    (tree / "code.py").write_text("x = 2\n")
    assert suite.recorded() is None


def test_without_git_no_test_record_is_valid(tree: Path) -> None:
    shutil.rmtree(tree / ".git")
    suite.RECORD.parent.mkdir()
    suite.RECORD.write_text(json.dumps({"state": "", "outcomes": {"a.py::b": ["passed"]}}))
    assert suite.tree_state() == "" and suite.recorded() is None


@pytest.mark.costly
def test_the_outcomes_of_all_tests_are_recorded(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "conftest.py", tree)
    (tree / "pyproject.toml").write_text(SETTINGS)
    (tree / "part").mkdir()
    (tree / "part" / "test_it.py").write_text(TESTS)
    commit(tree)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k test_quick")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert suite.main() == 1
    outcomes = suite.recorded()
    costly = [outcomes.pop(f"part/test_it.py::test_costly_{name}") for name in ("one", "two")]
    assert sorted(costly, key=min) == [{suite.NOT_SELECTED}, {"passed"}]
    assert outcomes == {
        "part/test_it.py::test_some": {"passed", "failed"},
        "part/test_it.py::test_quick": {"passed"},
        "part/test_it.py::test_alone": {"passed"},
        "part/test_it.py::test_left_out": {"skipped"},
    }


@pytest.mark.costly
@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_files", [1, 2])
def test_failed_tests_are_repeated_alone_and_printed_if_they_are_in_few_files(
    num_files: int,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(suite, "MAX_REPEATED_FILES", 1)
    monkeypatch.setattr(suite, "PARTS", {"--clock=without": ("-n", "1")})
    shutil.copy(ROOT / "conftest.py", tree)
    (tree / "pyproject.toml").write_text(SETTINGS)
    (tree / "part").mkdir()
    files = [f"part/test_{number}.py" for number in range(num_files)]
    for file in files:
        (tree / file).write_text(UNSTABLE)
    commit(tree)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    repeated = num_files == 1
    assert suite.main() == (0 if repeated else 1)
    outcomes = {"passed"} if repeated else {"failed"}
    expected = {f"{file}::test_unstable": outcomes for file in files}
    assert suite.recorded() == expected | {f"{file}::test_stable": {"passed"} for file in files}
    lines = capfd.readouterr().out.splitlines()
    names = [f"  {file}::test_unstable[{number}]" for file in files for number in range(2)]
    assert [line for line in lines if line in names] == (names if repeated else [])


@pytest.mark.costly
def test_tests_that_must_fail_are_not_repeated(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "PARTS", {"--clock=without": ("-n", "1")})
    shutil.copy(ROOT / "conftest.py", tree)
    (tree / "pyproject.toml").write_text(SETTINGS)
    (tree / "test_it.py").write_text(UNSTABLE)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    outcomes, code = suite.run_tests(["test_it.py::test_unstable"])
    assert (outcomes, code) == ({"test_it.py::test_unstable": {"failed"}}, suite.FAILED)


def test_only_files_with_clock_tests_run_in_the_second_part(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(part: str, *arguments: str, shown: bool, repeats: bool) -> tuple[suite.Outcomes, int]:
        calls.append((part, [item for item in arguments if "::" in item]))
        return {}, 0

    calls: list[tuple[str, list[str]]] = []
    (tree / "pyproject.toml").write_text(SETTINGS)
    (tree / "part").mkdir()
    (tree / "part" / "test_a.py").write_text(TESTS)
    (tree / "part" / "test_b.py").write_text("def test_1(): pass\n")
    monkeypatch.setattr(suite, "_run", run)
    both = ["part/test_a.py::test_alone", "part/test_b.py::test_1"]
    suite.run_tests(both)
    suite.run_tests(both[1:])
    assert calls == [
        ("--clock=without", both),
        ("--clock=only", both[:1]),
        ("--clock=without", both[1:]),
    ]


def test_a_run_during_which_a_file_changes_is_not_recorded(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, shown: bool, repeats: bool) -> tuple[suite.Outcomes, int]:
        (tree / "code.py").write_text("x = 3\n")
        return {"a.py::b": {"passed"}}, 0

    commit(tree)
    monkeypatch.setattr(suite, "run_tests", run)
    suite.RECORD.parent.mkdir()
    suite.RECORD.write_text("an older record")
    assert suite.main() == 0
    assert not suite.RECORD.exists()


def test_a_feature_is_proven_only_if_all_cases_of_its_tests_pass() -> None:
    row = "| X1 | thing | works | `a.py::one` `a.py::two` `a.py::three` `a.py::four` | direct |"
    known = {
        "a.py::one": {"passed"},
        "a.py::two": {"passed", "failed"},
        "a.py::three": {"skipped"},
    }
    assert unproven(read_features(row), known) == [
        "X1: a.py::two: failed, passed",
        "X1: a.py::three: skipped",
        "X1: a.py::four: not found",
    ]


def test_a_test_of_a_feature_is_run_if_the_commit_selected_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = "| X1 | thing | works | `a.py::one` `a.py::two` | direct |"
    runs: list[list[str]] = []
    outcome = {"passed"}

    def run(tests: list[str]) -> tuple[suite.Outcomes, int]:
        runs.append(tests)
        return {test: outcome for test in tests}, 0

    monkeypatch.setattr(prove, "run_tests", run)
    known = {"a.py::one": {"passed"}, "a.py::two": {suite.NOT_SELECTED}}
    assert unproven(read_features(row), known) == [] and runs == []
    known["a.py::one"] = {suite.NOT_SELECTED}
    assert unproven(read_features(row), known) == [] and runs == [["a.py::one"]]
    outcome = {"failed"}
    assert unproven(read_features(row), known) == [
        "X1: a.py::one: failed",
        "X1: a.py::two: not selected",
    ]


def test_a_test_must_fail_with_a_fake_or_not_be_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("one", "two", "three", "four")
    tests = " ".join(f"`a.py::{name}`" for name in names)
    outcomes = {
        "a.py::one": {"failed", "passed"},
        "a.py::two": {"passed"},
        "a.py::three": {suite.NOT_SELECTED},
    }
    options: list[tuple[str, ...]] = []

    def run(chosen: list[str], *given: str) -> tuple[suite.Outcomes, int]:
        options.append(given)
        assert len(chosen) == len(names)
        return outcomes, 1

    monkeypatch.setattr(prove, "run_tests", run)
    features = read_features(f"| X1 | thing | works | {tests} | worker |")
    assert prove.passing_with_fakes(features, suite.SOME_COSTLY) == [
        f"X1: a.py::{name} passes with the fake of worker instead of the implementation"
        for name in ("two", "four")
    ]
    assert options == [("--with-fake=worker", suite.SOME_COSTLY)]


def test_the_slowest_test_files_are_printed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = [("a.b", "1.5"), ("a.b", "0.25"), ("c", "2.0")]
    rows = "".join(f'<testcase classname="{name}" name="x" time="{s}"/>' for name, s in cases)
    report.write_text(f"<testsuite>{rows}</testsuite>", "utf-8")
    assert suite.slowest_files(report).splitlines() == [
        "test files by time, 4 s in total:",
        "    2.0 s  c",
        "    1.8 s  a.b",
    ]


def test_the_commit_hash_selects_the_faults_that_are_tried() -> None:
    faults = read_faults()
    samples = [sample_of(faults, bytes([number])) for number in range(256)]
    assert {len(sample) for sample in samples} == {-(-len(faults) // SAMPLED_FAULTS)}
    assert {fault.name for sample in samples for fault in sample} == {
        fault.name for fault in faults
    }
