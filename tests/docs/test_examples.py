"""Every file in examples/ runs without arguments, on the demo model, and prints something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CALLS = [
    'add({"a": 4728, "b": 1365}) -> 6093',
    "4728 + 1365 = 6093.",
    'weekday({"date": "2026-11-23", "days": 40}) -> Saturday',
    "It is Saturday.",
]
EXPECTED = {
    "agent_loop.py": CALLS,
    "agent_over_http.py": CALLS,
    "make_checkpoint.py": ["dovetail-checkpoint-"],
    "offline.py": ["27 + 58 = 85", "fox: f o x"],
    "own_loop.py": ["puzzle: p u z z l e", "fox: f o x"],
    "own_policy.py": ["fox: f o x", "cloud, farm, queen", "puzzle: p u z z l e"],
}
"""The expected output of each example, in order."""


@pytest.mark.parametrize(
    ("example", "argument", "message"),
    [
        ("make_checkpoint.py", ".", "already exists; specify another directory"),
        ("agent_over_http.py", "http://127.0.0.1:1/v1", "No connection to http://127.0.0.1:1/v1"),
    ],
)
@pytest.mark.costly
def test_an_example_reports_a_wrong_argument_without_a_traceback(
    example, argument, message, tmp_path
):
    command = [sys.executable, str(ROOT / "examples" / example), argument]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not [*tmp_path.iterdir()]


@pytest.fixture
def short_folder():
    """A temporary directory whose path is short enough for sockets."""
    with TemporaryDirectory() as folder:
        yield folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_without_arguments(example, tmp_path, monkeypatch, short_folder):
    monkeypatch.setenv("TMPDIR", short_folder)
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    indexes = [done.stdout.find(text) for text in EXPECTED[example.name]]
    assert -1 not in indexes, done.stdout
    if example.name == "own_policy.py":
        assert indexes == sorted(indexes)
