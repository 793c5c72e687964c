"""The installation lines of the README work in new environments, on each supported Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wheels.clean_environment import run
from wheels.other_pythons import find_python, make_pip_environment, pip_install

from architecture.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TORCH_FREE = (
    "dovetail-core",
    "dovetail-devkit",
    "dovetail-lab",
    "dovetail-sched-fcfs",
    "dovetail-sched-priority",
    "dovetail-sched-research",
)
POLICIES = ("scheduler:fcfs", "scheduler:priority", "policy:edf")
TORCH = next(
    line
    for line in (ROOT / "requirements" / "constraints.txt").read_text("utf-8").splitlines()
    if line.startswith("torch==")
)
ANSWER = """
from dovetail import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=16)
with LLM("demo", num_threads=1) as llm:
    chat = [{"role": "user", "content": "what is the sum of 27 and 58?"}]
    print(llm.chat(chat, params, use_tqdm=False)[0].outputs[0].text)
"""


@pytest.mark.costly
@pytest.mark.sampled(2)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_packages_without_torch_run_on_newer_python_versions(version, wheels, tmp_path):
    chosen = [wheels[name] for name in TORCH_FREE]
    python = make_pip_environment(tmp_path / "env", find_python(version), *chosen, at=tmp_path)
    listed = run(python.with_name("dovetail"), "plugins", "list", "scheduler", cwd=tmp_path)
    assert "dovetail-sched-fcfs" in listed
    program = "import sys, dovetail; dovetail.LLM; print('torch' in sys.modules)"
    assert run(python, "-c", program, cwd=tmp_path).strip() == "False"
    suites = [word for item in POLICIES for word in ("--dovetail-plugin", item)]
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites, cwd=tmp_path)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a copy of the tracked files, as after `git clone`."""
    folder = tmp_path_factory.mktemp("clone") / "dovetail"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.split(b"\0")):
        source, target = ROOT / os.fsdecode(name), folder / os.fsdecode(name)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


@pytest.mark.soak
def test_the_requirements_file_installs_a_checkout(checkout, tmp_path):
    python = make_pip_environment(tmp_path / "env", Path(sys.executable), TORCH, at=checkout)
    pip_install(python, ["-r", "requirements/cpu.txt"], at=checkout)
    assert "27 + 58 = 85" in run(python, "-c", ANSWER, cwd=tmp_path)


@pytest.mark.soak
def test_the_cpu_extra_installs_the_wheels_of_make_dist(checkout, wheels, tmp_path):
    folder = tmp_path / "dist"
    folder.mkdir()
    for wheel in wheels.values():
        shutil.copy2(wheel, folder)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps")
    run(*pip, "--no-build-isolation", "--wheel-dir", folder, checkout, cwd=tmp_path)
    python = make_pip_environment(tmp_path / "env", Path(sys.executable), TORCH, at=tmp_path)
    pip_install(python, ["--find-links", folder, "dovetail[cpu]"], at=tmp_path)
    assert "27 + 58 = 85" in run(python, "-c", ANSWER, cwd=tmp_path)
