"""Fixtures of the wheel tests: a wheel of each member."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from wheels.clean_environment import PIP, run

from architecture.sources import members, project_of


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Wheels of all members, by the name of their distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    halves = members()[::2], members()[1::2]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda some: run(*PIP, "wheel", "-q", *some, *options), halves))
    found = {path.name.partition("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
    assert set(found) == {project_of(member)["name"] for member in members()}
    return found
