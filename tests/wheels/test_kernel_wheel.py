"""The wheel of the native kernels is portable: machines without a compiler can install it."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from wheels.clean_environment import make_environment, run

from architecture.sources import ROOT

pytestmark = pytest.mark.slow

NEEDED = ("dovetail-core", "dovetail-torch", "dovetail-cpu", "dovetail-cpu-kernels")
SCRIPT = ROOT / "platforms/cpu_kernels/manylinux.py"


@pytest.fixture
def kernels(wheels):
    """Return the wheel of dovetail-cpu-kernels."""
    return wheels["dovetail-cpu-kernels"]


def test_auditwheel_accepts_the_manylinux_tag_of_the_wheel(kernels):
    (tag,) = re.findall(r"-py3-none-(manylinux_\d+_\d+_\w+)\.whl", kernels.name)
    shown = run(sys.executable, "-m", "auditwheel", "show", kernels)
    assert f'"{tag}"' in " ".join(shown.split())


def test_the_wheel_runs_native_kernels_on_a_machine_without_a_compiler(
    kernels, wheels, tmp_path, monkeypatch
):
    monkeypatch.setenv("CXX", "/bin/false")
    python = make_environment(tmp_path / "environment", [wheels[name] for name in NEEDED])
    environment = {**os.environ, "PATH": str(python.parent)}
    command = (python.with_name("dovetail"), "plugins", "explain", "linear_method")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert re.search(r"^1 +selected +native ", done.stdout, re.MULTILINE), done.stdout


def test_the_error_for_a_damaged_wheel_names_the_wheel(tmp_path, kernels):
    damaged = tmp_path / "dovetail_cpu_kernels-0.1.0-py3-none-linux_x86_64.whl"
    damaged.write_bytes(kernels.read_bytes()[:1000])
    command = (sys.executable, SCRIPT, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and damaged.name in done.stderr
    assert damaged.exists()


def test_only_the_wheels_of_the_native_kernels_get_a_manylinux_tag(tmp_path, wheels):
    shutil.copy2(wheels["dovetail-core"], tmp_path)
    assert run(sys.executable, SCRIPT, tmp_path) == ""
    assert [path.name for path in tmp_path.iterdir()] == [wheels["dovetail-core"].name]
