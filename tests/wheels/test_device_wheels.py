"""Wheels of the CUDA platform and its kernels beside the core, in an environment without a GPU.

What a user does first: install them, and ask why they are not used.
"""

import re
import subprocess

import pytest
from wheels.clean_environment import PIP, make_environment, run

from architecture.sources import ROOT

pytestmark = pytest.mark.slow

MEMBERS = (
    "core",
    "platforms/torch",
    "platforms/cuda",
    "platforms/ops_triton",
    "attention_backends/triton",
    "plugins/devkit",
)
PLUGINS = ("platform:cuda", "worker:cuda", "attention:triton")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with these wheels and what they need."""
    folder = tmp_path_factory.mktemp("device")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheels")
    run(*PIP, "wheel", "-q", *(ROOT / member for member in MEMBERS), *options)
    wheels = sorted((folder / "wheels").glob("*.whl"))
    assert len(wheels) == len(MEMBERS)
    made = make_environment(folder / "environment", wheels)
    program = "import sys, torch; sys.exit(torch.cuda.is_available())"
    if subprocess.run([made, "-c", program], check=False).returncode:
        pytest.skip("there is a GPU")
    return made


def dovetail(python, *words):
    done = subprocess.run(
        [python.with_name("dovetail"), *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_explain_says_why_cuda_is_refused(python):
    code, told = dovetail(python, "plugins", "explain", "platform")
    (line,) = [line for line in told.splitlines() if " cuda " in line]
    assert re.match(r"\d+ +refused +cuda +dovetail-cuda 0\.1\.0", line)
    assert "driver" in line or "CUDA" in line
    # There is no other platform in this environment: nobody is taken, and that is an error.
    assert code == 1 and "No platform" in told


def test_the_list_says_that_it_never_ran(python):
    code, told = dovetail(python, "plugins", "list", "attention")
    assert code == 0
    assert re.search(r"triton .*(never run on its device|\d{4}-\d{2}-\d{2})$", told, re.MULTILINE)


def test_conformance_passes_what_needs_no_gpu_and_counts_the_rest(python, tmp_path):
    asked = [word for plugin in PLUGINS for word in ("--dovetail-plugin", plugin)]
    told = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked, cwd=tmp_path)
    for plugin in PLUGINS:
        counts = re.search(
            rf"^{plugin}: (\d+) passed, 0 failed, 0 error, (\d+) skipped$", told, re.MULTILINE
        )
        assert counts and int(counts[1]) >= 4 and int(counts[2]) >= 2, told
    reasons = re.findall(r"^  \d+ skipped: (.*)$", told, re.MULTILINE)
    assert len(reasons) >= len(PLUGINS) and all(len(reason) > 10 for reason in reasons)
