"""Runs the conformance kit as users do: `pytest --dovetail-plugin` in an empty directory."""

import os
import re
import subprocess
import sys

import pytest

OK, TESTS_FAILED, USAGE_ERROR = 0, 1, 4

# No torch kinds, so that the run is quick; a separate test below runs them.
LIGHT = (
    "scheduler:fcfs",
    "policy:priority",
    "executor:uniproc",
    "platform:cpu",
    "tokenizer:huggingface",
)

WRONG_PARTS = '''
from dataclasses import replace

from dovetail.interfaces import Policy, Probe
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.attention import FakeAttentionBackend
from dovetail_devkit.fakes.platform import FakePlatform


class Fickle(Policy):
    """Ranks by the number of calls."""

    calls = 0

    def rank(self, request, view):
        Fickle.calls += 1
        return Fickle.calls


class ReturnsNoAborts(Scheduler):
    """Reports no aborted request."""

    def abort_requests(self, request_ids):
        super().abort_requests(request_ids)
        return []


class NeverSaysWhy(FakePlatform):
    """Reports that it is unusable, without a reason."""

    @classmethod
    def probe(cls):
        return Probe(usable=False)


class Elsewhere(FakePlatform):
    """Correct, but its device is missing."""

    @classmethod
    def probe(cls):
        return Probe(usable=False, reasons=("there is no abacus in this machine",))


class NeedsAbacus(FakeAttentionBackend):
    """Correct, but made for a missing device."""

    capabilities = replace(
        FakeAttentionBackend.capabilities, device_types=frozenset({"abacus"})
    )


class Impolite(Policy):
    """Its rank has an additional parameter."""

    def rank(self, request, view, mood):
        return 0
'''


@pytest.fixture
def kit(tmp_path):
    """Run the conformance kit on plugins in a directory without tests. Return exit code, output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}

    def run(*plugins, options=()):
        requested = [word for plugin in plugins for word in ("--dovetail-plugin", plugin)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *requested, *options],
            cwd=tmp_path,
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def wrong_parts(tmp_path):
    (tmp_path / "wrong_parts.py").write_text(WRONG_PARTS, encoding="utf-8")


def count(output, plugin, outcome):
    return int(re.search(rf"^{re.escape(plugin)}: .*?(\d+) {outcome}", output, re.M)[1])


@pytest.mark.slow  # test_installed.py runs a sample of the same suites
def test_first_party_plugins_pass_the_public_conformance_kit(kit):
    code, output = kit(*LIGHT)
    assert code == OK, output
    for plugin in LIGHT:
        assert count(output, plugin, "passed") >= 7, output
        assert count(output, plugin, "skipped") == 0, output


@pytest.mark.costly
def test_torch_plugins_pass_the_conformance_kit_and_the_k_option_selects_cases(kit, wrong_parts):
    chosen = "(float32 and decodes and not bfloat16) or chunks or prefix or seeds"
    plugins = ("attention:torch", "worker:cpu@dovetail-cpu", "attention:wrong_parts:NeedsAbacus")
    code, output = kit(*plugins, options=("-k", chosen, "-v"))
    assert code == OK, output
    assert count(output, "attention:wrong_parts:NeedsAbacus", "passed") == 0, output
    assert re.search(r"\d+ skipped: the plugin needs a device of the type abacus", output), output
    assert count(output, "attention:torch", "passed") >= 5, output
    assert count(output, "worker:cpu@dovetail-cpu", "passed") == 3, output
    assert "deselected" in output
    assert "worker:cpu@dovetail-cpu::chunks do not change the tokens PASSED" in output


@pytest.mark.costly
def test_each_fault_of_a_faulty_plugin_fails_its_check(kit, wrong_parts):
    laws = {
        "policy:wrong_parts:Fickle": r"two calls of rank for \w+ return \d+ and \d+",
        "scheduler:wrong_parts:ReturnsNoAborts": "abort_requests returns",
        "platform:wrong_parts:NeverSaysWhy": "must give a reason",
        "policy:wrong_parts:Impolite": "requires 'mood'",
    }
    code, output = kit(*laws, options=("-q",))
    assert code == TESTS_FAILED, output
    for plugin, law in laws.items():
        assert re.search(law, output), output
        assert count(output, plugin, "failed") >= 1, output


@pytest.mark.costly
def test_a_plugin_for_another_device_is_skipped_and_counted(kit, wrong_parts):
    code, output = kit("platform:wrong_parts:Elsewhere")
    assert code == OK, output
    assert re.search(r"2 skipped: there is no abacus in this machine", output), output


@pytest.mark.costly
@pytest.mark.parametrize(
    ("plugin", "printed"),
    [
        ("polcy:fcfs", "no plugin kind 'polcy'. Did you mean 'policy'?"),
        ("policy:fcfz", "no policy plugin 'fcfz'. Did you mean 'fcfs'?"),
        ("policy:wrong_parts:Fickel", "no attribute 'Fickel'. Did you mean 'Fickle'?"),
    ],
)
def test_an_unknown_plugin_is_reported_as_a_usage_error_in_one_line(
    kit, wrong_parts, plugin, printed
):
    code, output = kit(plugin)
    assert code == USAGE_ERROR, output
    (line,) = [line for line in output.splitlines() if line.strip()]
    assert printed in line


def test_pytest_without_the_option_does_not_import_dovetail():
    program = (
        "import sys, pytest\n"
        "pytest.main(['--version', '-q'])\n"
        "heavy = ('dovetail.config', 'dovetail.plugins', 'dovetail.interfaces', 'torch')\n"
        "sys.exit([name for name in heavy if name in sys.modules] or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == OK, done.stderr
