"""Wheels of the CUDA platform and its kernels with the core, in an environment without a GPU.

The tests install the wheels and check that commands explain why the plugins are not used.
"""

import re
import subprocess

import pytest
from wheels.clean_environment import make_environment, run

pytestmark = pytest.mark.slow

MEMBERS = (
    "dovetail-core",
    "dovetail-torch",
    "dovetail-cuda",
    "dovetail-ops-triton",
    "dovetail-attn-triton",
    "dovetail-devkit",
)
PLUGINS = ("platform:cuda", "worker:cuda", "attention:triton")


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory):
    """Return an interpreter with these wheels and their dependencies."""
    folder = tmp_path_factory.mktemp("device")
    path = make_environment(folder / "environment", [wheels[name] for name in MEMBERS])
    program = "import sys, torch; sys.exit(torch.cuda.is_available())"
    if subprocess.run([path, "-c", program], check=False).returncode:
        pytest.skip("there is a GPU")
    return path


def dovetail(python, *words):
    done = subprocess.run(
        [python.with_name("dovetail"), *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_explain_reports_why_cuda_is_rejected(python):
    code, output = dovetail(python, "plugins", "explain", "platform")
    (line,) = [line for line in output.splitlines() if " cuda " in line]
    assert re.match(r"\d+ +rejected +cuda +dovetail-cuda 0\.1\.0", line)
    assert "driver" in line or "CUDA" in line
    # This environment has no other platform, so that the selection fails.
    assert code == 1 and "No platform" in output


def test_the_plugin_list_marks_plugins_that_never_ran_on_their_device(python):
    code, output = dovetail(python, "plugins", "list", "attention")
    assert code == 0
    ran = r"never run on its device|\d{4}-\d{2}-\d{2}, commit [0-9a-f]{7,}"
    assert re.search(rf"triton .*({ran})$", output, re.MULTILINE)


@pytest.mark.costly
def test_the_conformance_kit_skips_tests_that_need_a_gpu(python, tmp_path):
    options = [word for plugin in PLUGINS for word in ("--dovetail-plugin", plugin)]
    output = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, cwd=tmp_path)
    for plugin in PLUGINS:
        counts = re.search(
            rf"^{plugin}: (\d+) passed, 0 failed, 0 error, (\d+) skipped$", output, re.MULTILINE
        )
        assert counts and int(counts[1]) >= 4 and int(counts[2]) >= 2, output
    reasons = re.findall(r"^  \d+ skipped: (.*)$", output, re.MULTILINE)
    assert len(reasons) >= len(PLUGINS) and all(len(reason) > 10 for reason in reasons)
