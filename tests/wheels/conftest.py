"""Fixtures of the wheel tests: a wheel of each member."""

import fcntl
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from wheels.clean_environment import PIP, run

from architecture.sources import ROOT, members, project_of


@pytest.fixture(scope="session")
def wheels(tmp_path_factory, request):
    """Wheels of all members, by the name of their distribution.

    Test processes that run in parallel share the wheels, because simultaneous builds of one source
    tree would disturb each other.
    """
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    folder = folder / "wheels"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        discovered = find_wheels(folder) or build_wheels(folder)
    assert set(discovered) == {project_of(member)["name"] for member in members()}
    return discovered


def find_wheels(folder):
    return {path.name.partition("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


BUILD = """
import os, sys
from hatchling.build import build_wheel
for member in sys.argv[2:]:
    os.chdir(member)
    build_wheel(sys.argv[1])
"""


def build_wheels(folder):
    """Build the wheels with their build backends. pip would start three processes for each."""
    native = [member for member in members() if (member / "setup.py").is_file()]
    plain = [member for member in members() if member not in native]
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    with ThreadPoolExecutor() as pool:
        compiled = pool.submit(run, *PIP, "wheel", "-q", *native, *options)
        run(sys.executable, "-c", BUILD, folder, *plain)
        compiled.result()
    run(sys.executable, ROOT / "platforms/cpu_kernels/manylinux.py", folder)
    return find_wheels(folder)
