"""The commands of the lab's tutorial work, in a short form: fewer requests and seeds."""

import re
import shlex
from pathlib import Path

import pytest

from dovetail.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "lab" / "tutorial.md"
SHORTER = (
    ("--requests 300", "--requests 60 --jobs 2"),
    ("--seeds 10", "--seeds 2"),
    ("--load 0.5,0.7,0.9", "--load 0.9"),
    ("--metric gap_mean", "--metric gap_mean --seeds 2 --load 0.9"),
    ("--trials 20", "--trials 2 --requests 40 --seeds 2 --jobs 2"),
)


def commands():
    """Return the arguments of each command on the page, in order."""
    text = PAGE.read_text("utf-8").replace("\\\n", " ")
    collected = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in [] if language else block.splitlines():
            if not line.startswith("dovetail "):
                continue
            for long, short in SHORTER:
                line = line.replace(long, short)
            arguments = shlex.split(line)[1:]
            if arguments[1] == "run":
                arguments = [item for item in arguments if item not in ("--jobs", "2")]
            collected.append(arguments)
    return collected


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_commands_of_the_tutorial_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    Path("mine.py").write_text(source)
    steps = commands()
    assert [step[1] for step in steps] == [
        "run", "compare", "explain", "explain", "diff", "sweep", "adversary",
    ]  # fmt: skip
    assert len(steps) + 1 <= 10, "at most ten commands with the installation"
    outputs = []
    for step in steps:
        assert main(step) == (1 if step[1] == "diff" else 0), step
        outputs.append(capsys.readouterr().out)
    assert "ShortPrompts" in outputs[1] and "paired differences to fcfs" in outputs[1]
    assert "r32" in outputs[3]
    for name in re.findall(r"`results/([\w./*]+?)`", PAGE.read_text("utf-8")):
        assert [*Path("results").glob(name)], name


def test_make_lab_runs_the_example_of_the_tutorial():
    example = ROOT / "examples" / "lab_comparison.toml"
    assert example.is_file()
    assert f"compare {example.relative_to(ROOT)}" in (ROOT / "Makefile").read_text("utf-8")
    assert "`make lab`" in PAGE.read_text("utf-8")
