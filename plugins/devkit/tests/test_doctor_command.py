"""`dovetail plugins doctor`: what a person sees, what a program reads, what it exits with."""

from __future__ import annotations

import json

import pytest

from dovetail.cli import main
from dovetail_devkit.commands import doctor as doctor_command
from dovetail_devkit.doctor import BROKEN, NOTE, OK, WARNING, Finding


def finding(area, subject, verdict, text="so it is", remedy=""):
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
    finding("plugins", "policy:c@y", WARNING, "it prints \x1b[31m", "tell its author"),
    finding("plugins", "policy:d@z", BROKEN, "it ended the process", "uninstall it"),
]


@pytest.fixture
def patient(monkeypatch):
    asked = {}

    def lie_down(findings):
        def examine(*, deadline_s, progress, no_plugins):
            asked.update(deadline_s=deadline_s)
            return findings

        monkeypatch.setattr(doctor_command, "examine", examine)
        return asked

    return lie_down


def test_what_is_well_is_counted_and_the_exit_code_is_0(patient, capsys):
    patient(WELL)
    assert main(["plugins", "doctor"]) == 0
    told = capsys.readouterr().out
    assert "2 plugins" in told and "load and match their contracts" in told
    assert "policy:a@x" not in told
    assert told.splitlines()[-1] == "0 broken, 0 warnings, 1 note, 4 ok."


def test_all_of_them_are_shown_on_demand(patient, capsys):
    patient(WELL)
    assert main(["plugins", "doctor", "--all"]) == 0
    told = capsys.readouterr().out
    assert "policy:a@x" in told and "2 plugins" not in told


def test_what_is_broken_is_reported_with_its_remedy_and_exit_code_1(patient, capsys):
    patient(ILL)
    assert main(["plugins", "doctor"]) == 1
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if "policy:d@z" in line]
    assert line.split()[0] == "broken"
    assert "→ uninstall it" in told and "→ tell its author" in told
    assert "\x1b" not in told, "what a plugin prints must not steer the terminal"
    assert told.splitlines()[-1].startswith("1 broken, 1 warning,")


def test_json_is_an_array_of_findings(patient, capsys):
    asked = patient(ILL)
    assert main(["plugins", "doctor", "--json", "--deadline", "7"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["verdict"] for one in told].count(BROKEN) == 1
    assert set(told[0]) == {"area", "subject", "verdict", "text", "remedy"}
    assert asked["deadline_s"] == 7


def test_a_deadline_must_be_possible(patient, capsys):
    patient(WELL)
    assert main(["plugins", "doctor", "--deadline", "0"]) == 2
    assert "--deadline" in capsys.readouterr().err
