"""The mutator makes only the documented mutations. A trial reports killed or survived mutants."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutation.mutator import make_mutants
from mutation.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]

SOURCE = '''
"""A module that counts."""

LIMIT = 3


def check_integrity(items):
    """Leave me alone."""
    return items != 1


def take(items, limit=LIMIT, *, strict=True):
    """Return some of `items`."""
    taken = []
    for item in items:
        if item < 0 and not strict:
            raise ValueError(f"{item + 1} is less than {0}")
        assert item != 5
        if len(taken) >= limit:
            break
        taken.append(item + 1)
    return list(zip(taken, taken, strict=True))
'''


@pytest.fixture(scope="module")
def mutants():
    return make_mutants(SOURCE, skipped_functions=frozenset({"check_integrity"}))


def test_each_operator_of_a_function_is_mutated_once(mutants):
    assert {str(mutant).partition("  →  ")[2] for mutant in mutants} == {
        "LIMIT = 4",
        "LIMIT = 2",
        "def take(items, limit=LIMIT, *, strict=False):",
        "if item >= 0 and (not strict):",
        "if item <= 0 and (not strict):",
        "if item < 1 and (not strict):",
        "if item < -1 and (not strict):",
        "if item < 0 or not strict:",
        "if item < 0 and strict:",
        "if len(taken) < limit:",
        "if len(taken) > limit:",
        "pass",
        "taken.append(item - 1)",
        "taken.append(item + 2)",
        "taken.append(item + 0)",
        "return None",
    }
    assert len(mutants) == 17  # "pass" replaces the break and the append


def test_every_mutant_has_one_changed_line_and_compiles(mutants):
    lines = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in mutants:
        compile(mutant.tree, "mutant", "exec")
        mutated = ast.unparse(mutant.tree).splitlines()
        assert sum(a != b for a, b in zip(lines, mutated, strict=True)) == 1


@pytest.mark.sampled(10)
@pytest.mark.parametrize("path", [target.path for target in TARGETS])
def test_a_target_exists_and_has_mutants(path):
    assert len(make_mutants((ROOT / path).read_text("utf-8"))) >= 20


def run(*options):
    return subprocess.run(
        [sys.executable, "-m", "mutation", "--nice", "0", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "tests"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_suites_kill_a_sample_of_mutants():
    done = run("--only", "scheduling/draft", "--sample", "8", "--at-least", "0.7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 8 killed" in done.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_suites_kill_at_least_70_percent_of_six_mutants_of_each_file():
    """All mutants take half an hour: `PYTHONPATH=tests python -m mutation` tries them."""
    done = run("--sample", "6", "--at-least", "0.7")
    assert done.returncode == 0, done.stdout + done.stderr
