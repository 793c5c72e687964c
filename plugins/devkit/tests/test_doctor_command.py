"""Tests of the output and the exit code of `dovetail plugins doctor`."""

from __future__ import annotations

import json

import pytest

from dovetail.cli import main
from dovetail_devkit.commands import doctor as doctor_command
from dovetail_devkit.doctor import BROKEN, NOTE, OK, WARNING, Finding


def finding(area, subject, verdict, text="a text", remedy=""):
    return Finding(area=area, subject=subject, verdict=verdict, text=text, remedy=remedy)


WELL = [
    finding("machine", "cores", OK),
    finding("machine", "device", NOTE),
    finding("plugins", "declarations", OK),
    finding("plugins", "policy:a@x", OK),
    finding("plugins", "policy:b@x", OK),
]
ILL = [
    *WELL,
    finding("plugins", "policy:c@y", WARNING, "it prints \x1b[31m", "ask the author"),
    finding(
        "plugins",
        "policy:d@z",
        BROKEN,
        "the process exited while it loaded the plugin",
        "uninstall it",
    ),
]


@pytest.fixture
def patient(monkeypatch):
    settings = {}

    def lie_down(findings):
        def examine(*, deadline_s, progress, no_plugins):
            settings.update(deadline_s=deadline_s)
            return findings

        monkeypatch.setattr(doctor_command, "examine", examine)
        return settings

    return lie_down


def test_working_plugins_are_counted_and_the_exit_code_is_0(patient, capsys):
    patient(WELL)
    assert main(["plugins", "doctor"]) == 0
    output = capsys.readouterr().out
    assert "2 plugins" in output and "can be loaded and satisfy their contracts" in output
    assert "policy:a@x" not in output
    assert output.splitlines()[-1] == "0 broken, 0 warnings, 1 note, 4 ok."


def test_the_all_option_lists_every_plugin(patient, capsys):
    patient(WELL)
    assert main(["plugins", "doctor", "--all"]) == 0
    output = capsys.readouterr().out
    assert "policy:a@x" in output and "2 plugins" not in output


def test_a_broken_plugin_is_reported_with_a_remedy_and_exit_code_1(patient, capsys):
    patient(ILL)
    assert main(["plugins", "doctor"]) == 1
    output = capsys.readouterr().out
    (line,) = [line for line in output.splitlines() if "policy:d@z" in line]
    assert line.split()[0] == "broken"
    assert "→ uninstall it" in output and "→ ask the author" in output
    assert "\x1b" not in output, "text of a plugin must not contain control sequences"
    assert output.splitlines()[-1].startswith("1 broken, 1 warning,")


def test_the_json_output_is_an_array_of_findings(patient, capsys):
    settings = patient(ILL)
    assert main(["plugins", "doctor", "--json", "--deadline", "7"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert [item["verdict"] for item in output].count(BROKEN) == 1
    assert set(output[0]) == {"area", "subject", "verdict", "text", "remedy"}
    assert settings["deadline_s"] == 7


def test_a_deadline_of_0_seconds_is_rejected(patient, capsys):
    patient(WELL)
    assert main(["plugins", "doctor", "--deadline", "0"]) == 2
    assert "--deadline" in capsys.readouterr().err
