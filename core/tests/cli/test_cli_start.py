"""The CPU time of short commands, and the options that help pages show."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from dovetail.cli import main
from dovetail.cli.engine_options import MAIN
from dovetail.config import EngineArgs

COMMANDS = ("bench latency", "bench throughput", "chat", "demo", "generate")
MAX_OPTIONS = 40


MAIN_CODE = "import sys; from dovetail.cli import main; sys.exit(main(sys.argv[1:]))"
REFERENCE_CODE = (
    "import asyncio, decimal, email.mime.text, http.client, importlib.metadata, pydoc, "
    "unittest.mock, xml.dom.minidom, cyclopts, rich.console"
)
REFERENCE_S = 0.2
"""CPU time of REFERENCE_CODE on the machine that the limits are for."""


def cpu_seconds(code: str, *arguments: str) -> float:
    """Return the CPU time of one Python process."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture(scope="module")
def slowness() -> float:
    """The factor by which this machine is now slower than the machine that defines the limits."""
    return max(1.0, min(cpu_seconds(REFERENCE_CODE) for _ in range(5)) / REFERENCE_S)


@pytest.mark.clock
@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        (["--version"], 0.15),
        (["--help"], 0.3),
        (["generate", "--model", "/no/such/model", "x"], 0.5),
        (["chat", "--model", "./no-such-model"], 0.5),
        (["generate", "--modle", "demo", "x"], 0.5),
        (["chat", "--model", "demo", "--temprature", "0"], 0.5),
    ],
)
def test_short_commands_need_little_cpu_time(
    arguments: list[str], limit_s: float, slowness: float, note
) -> None:
    for _ in range(5):  # other work on the machine increases the CPU time of some runs
        used_s = cpu_seconds(MAIN_CODE, *arguments) / slowness
        if used_s <= limit_s:
            break
    note(f"dovetail {' '.join(arguments)}: {used_s:.3f} s of CPU")
    assert used_s <= limit_s


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["generate", "--modle", "demo", "x"], "--model"),
        (["chat", "--model", "demo", "--temprature", "0"], "--temperature"),
        (["generate", "--model", "./no-such-model", "x"], "does not exist"),
    ],
)
def test_errors_for_invalid_options_and_paths_have_at_most_three_lines(
    arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 3
    assert nearest in lines[0]
    assert "--help" in lines[-1] or "Specify the path" in lines[-1]


@pytest.fixture
def read_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A function that returns the flags in a help page."""
    monkeypatch.setenv("COLUMNS", "200")  # long flags are not divided

    def read(*arguments: str) -> set[str]:
        assert main(arguments) == 0
        return set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))

    return read


@pytest.mark.costly
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_at_most_forty_options(command: str, read_help) -> None:
    shown = read_help(*command.split(), "--help")
    assert ("--help-all" in shown) == (command != "demo")
    assert len(shown - {"--help-all"}) <= MAX_OPTIONS


def test_help_all_shows_every_engine_option(read_help) -> None:
    shown = read_help("generate", "--help-all")
    flags = {
        f"--{name.replace('_', '-')}"
        for name, text in EngineArgs.descriptions().items()
        if not text.startswith("Not supported")
    }
    assert flags <= shown
    assert {f"--{name.replace('_', '-')}" for name in MAIN} <= shown


def test_help_all_after_a_double_dash_is_read_as_a_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--model", "./no-such-model", "--", "--help-all"]) == 2
    assert "does not exist" in capsys.readouterr().err
