"""Each member passes the conformance kit and its own tests in a separate environment.

An environment holds one member, its declared dependencies, the devkit and the test tools.
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pluggy
import pytest
from features.suite import commit
from wheels.clean_environment import make_environment, run

from architecture.sources import ROOT, members, project_of, relative
from dovetail.plugin_kinds import GROUP_PREFIX, KINDS

pytestmark = pytest.mark.slow

NUM_AT_ONCE = 2
MAX_PLUGINS = 6
"""`make wheels` tests at most this number of plugins of a member, selected by the commit."""
OWN_TESTS_SHARE = 4
"""One in this number of the tests of each file runs in the environment of a member. `make test`
runs all of them where all members are installed."""
OURS = {project_of(member)["name"]: member for member in members()}
DEVKIT = OURS["dovetail-devkit"]
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "transformers")
"""Packages that the tests of members use in addition to the members and their `test` extra."""


def needs(member, extra=()):
    """Return the names of a member and of the members that it needs.

    extra: additional requirements.
    """
    project = project_of(member)
    requirements = [
        re.match(r"[\w.-]+", requirement).group()
        for requirement in (*project["dependencies"], *extra)
    ]
    own = [
        name
        for requirement in requirements
        if requirement in OURS
        for name in needs(OURS[requirement])
    ]
    return list(dict.fromkeys([project["name"], *own]))


def plugins_of(member):
    groups = project_of(member).get("entry-points", {})
    kinds = {group.removeprefix(GROUP_PREFIX): points for group, points in groups.items()}
    return [f"{kind}:{name}" for kind, points in kinds.items() if kind in KINDS for name in points]


def some_of(plugins: Sequence[str]) -> list[str]:
    """Return at most MAX_PLUGINS of the plugins, selected by the hash of the commit."""
    ordered = sorted(plugins, key=lambda name: sha256(commit() + name.encode()).digest())
    return ordered[:MAX_PLUGINS]


def kit_report(member, plugins, wheels, folder):
    """Install one member. Return the kit's report on `plugins`, or "" if there are none."""
    chosen = [wheels[name] for name in dict.fromkeys([*needs(member), *needs(DEVKIT)])]
    python = make_environment(folder / "environment", chosen)
    (package,) = (member / "src").glob("*/__init__.py")
    run(python, "-c", f"import {package.parent.name}", cwd=folder)
    options = [word for item in plugins for word in ("--dovetail-plugin", item)]
    if not options:
        return ""  # the member provides data or commands, but no plugins
    empty = folder / "empty"
    empty.mkdir()
    one_thread = ("env", "OMP_NUM_THREADS=1")  # several environments run in parallel
    kit = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *options)
    return run(*one_thread, python, *kit, cwd=empty)


@pytest.fixture(scope="module")
def trials(request, wheels, tmp_path_factory):
    """Return a function from a member to its tested plugins and the kit's report on them.

    Several members are tested in parallel: by this process, or by the processes of pytest-xdist,
    each of which tests the requested members only.
    """
    select = some_of if request.config.getoption("--some-costly") else list

    def start(member):
        names = select(plugins_of(member))
        folder = tmp_path_factory.mktemp(member.name)
        return names, pool.submit(kit_report, member, names, wheels, folder)

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        if hasattr(request.config, "workerinput"):
            yield start
            return
        items = [item for item in request.session.items if "trials" in item.fixturenames]
        members_of_run = [item.callspec.params["member"] for item in items]
        yield {member: start(member) for member in members_of_run}.__getitem__


@pytest.mark.timeout(1500)
@pytest.mark.sampled(20)
@pytest.mark.parametrize("member", [pytest.param(item, id=relative(item)) for item in members()])
def test_a_wheel_with_only_its_dependencies_passes_the_conformance_kit(member, trials):
    plugins, report = trials(member)
    output = report.result()
    assert bool(plugins) == bool(plugins_of(member))
    for plugin in plugins:
        counts = re.search(rf"^{re.escape(plugin)}: (\d+) passed, 0 .* (\d+) skipped", output, re.M)
        assert counts, output
        passed, skipped = map(int, counts.groups())
        # Tests that need an absent device are counted as skipped.
        assert passed >= (4 if skipped else 5), output


def run_own_tests(member, wheels, folder):
    """Run a member's tests in an environment with its dependencies, the devkit and the tools."""
    extra = project_of(member).get("optional-dependencies", {}).get("test", ())
    names = dict.fromkeys([*needs(member, extra), *needs(DEVKIT)])
    others = [re.match(r"[\w.-]+", requirement).group() for requirement in extra]
    tools = [*TOOLS, *(name for name in others if name not in OURS)]
    python = make_environment(folder / "env", [wheels[name] for name in names], tools=tools)
    # Paths of sockets have at most 108 bytes.
    with tempfile.TemporaryDirectory(prefix="own-") as short:
        options = ("-q", "-p", "no:cacheprovider", "--clock=without", "--some-costly")
        options += (f"--one-in={OWN_TESTS_SHARE}", f"--basetemp={short}/t")
        output = run("env", "OMP_NUM_THREADS=1", python, "-m", "pytest", *options, member, cwd=ROOT)
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output


@pytest.mark.costly
def test_the_tests_of_a_small_member_pass_with_only_its_dependencies(wheels, tmp_path):
    run_own_tests(OURS["dovetail-sched-fcfs"], wheels, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("member", [pytest.param(item, id=relative(item)) for item in members()])
def test_the_tests_of_a_member_pass_with_only_its_dependencies(member, wheels, tmp_path):
    run_own_tests(member, wheels, tmp_path)


def test_the_environment_of_a_member_has_only_declared_packages(wheels, tmp_path):
    python = make_environment(tmp_path / "environment", [wheels["dovetail-core"]])
    program = (
        "import importlib.util as u, json; names = ('torch', 'numpy', 'transformers', 'pytest',"
        "'dovetail_cpu', 'pydantic'); print(json.dumps([n for n in names if u.find_spec(n)]))"
    )
    assert run(python, "-c", program, cwd=tmp_path).strip() == '["pydantic"]'


def test_environments_share_the_bytecode_of_linked_packages(wheels, tmp_path, monkeypatch):
    prefix = tmp_path / "bytecode"
    monkeypatch.setattr(sys, "pycache_prefix", str(prefix))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(prefix))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    python = make_environment(tmp_path / "environment", [wheels["dovetail-core"]])
    run(python, "-c", "import pluggy", cwd=tmp_path)
    source = Path(pluggy.__file__).parent
    assert [*prefix.joinpath(*source.parts[1:]).glob("__init__.*.pyc")]


def test_the_wheel_of_every_member_is_tested():
    assert len(OURS) >= 7
    assert ROOT / "core" in OURS.values()
