"""A hash of the commit selects costly tests, cases of sampled tests, and a share of each file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from features.small_tree import SETTINGS, commit

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return an empty git checkout."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


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
