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
SAMPLED = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(8))
def test_some(number):
    pass

SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in range(1, 9)]

@pytest.mark.sampled(9)
@pytest.mark.parametrize("number", [0, *SLOW])
def test_one_quick_case(number):
    pass
"""
COSTLY = "import pytest\n" + "\n".join(
    f"@pytest.mark.costly\ndef test_{number}(): pass" for number in range(16)
)
COSTLY_FILE = """
import pytest
pytestmark = pytest.mark.costly

def test_one(): pass

@pytest.mark.costly
def test_two(): pass
"""
SETTINGS = """
[tool.pytest.ini_options]
addopts = ["-m", "not slow and not soak"]
testpaths = ["part", "*/others"]
markers = ["clock: one", "slow: two", "soak: three", "sampled: four", "costly: five"]
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


def commit(tree: Path) -> None:
    named = ("-c", "user.name=x", "-c", "user.email=x@y")
    subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    subprocess.run(["git", *named, "commit", "-qm", "x"], cwd=tree, check=True)


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
    (tree / "part" / "test_b.py").write_text(COSTLY)
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


def outputs_at_four_commits(tree: Path, tests: str, *options: str) -> list[list[str]]:
    """Return the lines that pytest prints for `tests` at each of four commits."""
    shutil.copy(ROOT / "conftest.py", tree)
    (tree / "pyproject.toml").write_text(SETTINGS)
    (tree / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    outputs = []
    for number in range(4):
        (tree / "code.py").write_text(f"x = {number}\n")
        commit(tree)
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.splitlines())
    return outputs


@pytest.mark.costly
def test_the_commit_hash_selects_a_part_of_the_costly_tests(tree: Path) -> None:
    outputs = outputs_at_four_commits(tree, COSTLY, "-v", "--some-costly")
    chosen = [{line.split()[0] for line in lines if "PASSED" in line} for lines in outputs]
    assert all("not selected at this commit: 14 costly tests (14 cases)" in it for it in outputs)
    assert [len(item) for item in chosen] == [2] * 4
    assert len(set.union(*chosen)) > 2


@pytest.mark.costly
def test_a_costly_test_with_its_own_share_is_selected_independently(tree: Path) -> None:
    tests = COSTLY.replace("costly", "costly(4)")
    outputs = outputs_at_four_commits(tree, tests, "-v", "--some-costly")
    assert 0 < sum("PASSED" in line for lines in outputs for line in lines) < 40  # expected: 16


@pytest.mark.costly
def test_the_tests_of_a_costly_file_are_selected_together(tree: Path) -> None:
    for number in range(9):
        (tree / f"test_{number}.py").write_text(COSTLY_FILE)
    for lines in outputs_at_four_commits(tree, COSTLY_FILE, "-v", "--some-costly"):
        chosen = [line.partition("::")[0] for line in lines if "PASSED" in line]
        assert len(chosen) == 4 and len(set(chosen)) == 2


@pytest.mark.costly
def test_the_commit_hash_selects_a_share_of_the_tests_of_each_file(tree: Path) -> None:
    (tree / "test_other.py").write_text("def test_one(): pass\n")
    outputs = outputs_at_four_commits(tree, COSTLY, "-v", "--one-in=4")
    chosen = [{line.split()[0] for line in lines if "PASSED" in line} for lines in outputs]
    assert all(len(item) == 5 and "test_other.py::test_one" in item for item in chosen)
    assert len(set.union(*chosen)) > 5


@pytest.mark.costly
def test_without_the_option_all_costly_tests_run(tree: Path) -> None:
    for lines in outputs_at_four_commits(tree, COSTLY, "-v"):
        assert sum("PASSED" in line for line in lines) == 16


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


@pytest.mark.costly
def test_the_commit_hash_selects_a_part_of_the_cases_of_a_sampled_test(tree: Path) -> None:
    outputs = outputs_at_four_commits(tree, SAMPLED, "-q", "--collect-only")
    chosen = [{line for line in lines if "::test_some[" in line} for lines in outputs]
    assert all("test_it.py::test_one_quick_case[0]" in lines for lines in outputs)
    assert [len(item) for item in chosen] == [3] * 4
    assert len(set.union(*chosen)) > 3


@pytest.mark.costly
def test_the_slow_cases_of_a_sampled_test_are_sampled_separately(tree: Path) -> None:
    options = ("-q", "--collect-only", "-m", "slow and not soak")
    for lines in outputs_at_four_commits(tree, SAMPLED, *options):
        assert sum("::test_one_quick_case[" in line for line in lines) == 1


def test_the_commit_hash_selects_the_faults_that_are_tried() -> None:
    faults = read_faults()
    samples = [sample_of(faults, bytes([number])) for number in range(256)]
    assert {len(sample) for sample in samples} == {-(-len(faults) // SAMPLED_FAULTS)}
    assert {fault.name for sample in samples for fault in sample} == {
        fault.name for fault in faults
    }
