"""Fault points are listed, off by default, and perform the requested action."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail
from dovetail.errors import ConfigError
from dovetail.faults import POINTS, VARIABLE, InjectedError, arm, fault, read_fault_specs
from dovetail.processes.startup_phases import PHASES

CORE = Path(dovetail.__file__).parent


def points_in(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "fault":
            yield ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""


@pytest.mark.costly
def test_the_list_of_fault_points_equals_the_fault_points_in_the_code():
    used = [point for path in CORE.rglob("*.py") for point in points_in(path) if point]
    used += [f"start.{name}" for name in PHASES]
    assert sorted(used) == sorted(POINTS)
    assert len(POINTS) >= 40


def test_a_fault_point_has_no_effect_unless_requested():
    fault("core.launch")
    fault("an unknown point")  # names are not checked


def test_a_fault_occurs_once_at_the_requested_hit_of_its_fault_point():
    with arm("core.launch:raise@3; core.update:delay=0"):
        fault("core.launch")
        fault("core.update")
        fault("core.launch")
        with pytest.raises(InjectedError, match=r"core\.launch"):
            fault("core.launch")
        fault("core.launch")
        with pytest.raises(ConfigError, match=r"Did you mean 'core\.launch'"):
            fault("core.launc")
    fault("core.launch")


def test_a_fault_record_contains_each_fault_point_once(tmp_path):
    with arm(f"*:record={tmp_path / 'seen'}"):
        for point in ("core.launch", "core.update", "core.launch"):
            fault(point)
    assert (tmp_path / "seen").read_text() == "core.launch\ncore.update\n"


@pytest.mark.parametrize(
    ("spec", "status"),
    [("kill", -signal.SIGKILL), ("exit=7", 7), ("exit", 3), ("raise", 1), ("delay=0", 0)],
)
def test_faults_are_read_from_the_environment(spec, status):
    code = "from dovetail.faults import fault; fault('core.launch')"
    requested = os.environ | {VARIABLE: f"core.launch:{spec}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=requested, capture_output=True, check=False
    )
    assert done.returncode == status


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("core.launc:kill", "Did you mean 'core.launch'"),
        ("core.launch:explode", "unknown action. The actions are delay, exit"),
        ("core.launch:raise@soon", "must be numbers"),
        ("core.launch:delay=long", "must be numbers"),
    ],
)
def test_an_invalid_fault_spec_is_rejected(text, message):
    with pytest.raises(ConfigError, match=message):
        read_fault_specs(text)
