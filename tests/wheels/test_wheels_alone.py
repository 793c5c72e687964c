"""Wheels of members in environments of their own: they pass the kit, and their tests run alone.

An environment holds one member, what it declares, the devkit and the tools of tests.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from wheels.clean_environment import make_environment, run

from architecture.sources import ROOT, members, project_of, relative
from dovetail.plugin_kinds import GROUP_PREFIX, KINDS

pytestmark = pytest.mark.slow

NUM_AT_ONCE = 2
OURS = {project_of(member)["name"]: member for member in members()}
DEVKIT = OURS["dovetail-devkit"]
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "transformers")
"""What the tests of members use beside the members and their extra `test`."""


def needs(member, extra=()):
    """Names of the members that this one needs, its own first. extra: requirements beside."""
    project = project_of(member)
    wishes = [re.match(r"[\w.-]+", wish).group() for wish in (*project["dependencies"], *extra)]
    ours = [name for wish in wishes if wish in OURS for name in needs(OURS[wish])]
    return list(dict.fromkeys([project["name"], *ours]))


def plugins_of(member):
    groups = project_of(member).get("entry-points", {})
    kinds = {group.removeprefix(GROUP_PREFIX): points for group, points in groups.items()}
    return [f"{kind}:{name}" for kind, points in kinds.items() if kind in KINDS for name in points]


def kit_says(member, wheels, folder):
    """Install a member alone, and return what the kit says of its plugins; "" if it has none."""
    chosen = [wheels[name] for name in dict.fromkeys([*needs(member), *needs(DEVKIT)])]
    python = make_environment(folder / "environment", chosen)
    (package,) = (member / "src").glob("*/__init__.py")
    run(python, "-c", f"import {package.parent.name}", cwd=folder)
    asked = [word for one in plugins_of(member) for word in ("--dovetail-plugin", one)]
    if not asked:
        return ""  # it offers data or commands, and no plugin of a kind
    empty = folder / "empty"
    empty.mkdir()
    one_thread = ("env", "OMP_NUM_THREADS=1")  # for each of those that run side by side
    kit = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *asked)
    return run(*one_thread, python, *kit, cwd=empty)


@pytest.fixture(scope="module")
def trials(request, wheels, tmp_path_factory):
    """What the kit says, by member: of those that this run asks for, a few at a time."""
    items = [item for item in request.session.items if "trials" in item.fixturenames]
    asked = [item.callspec.params["member"] for item in items]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        folders = {member: tmp_path_factory.mktemp(member.name) for member in asked}
        yield {one: pool.submit(kit_says, one, wheels, folders[one]) for one in asked}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("member", [pytest.param(one, id=relative(one)) for one in members()])
def test_a_wheel_alone_passes_the_kit(member, trials):
    told = trials[member].result()
    for plugin in plugins_of(member):
        counts = re.search(rf"^{re.escape(plugin)}: (\d+) passed, 0 .* (\d+) skipped", told, re.M)
        assert counts, told
        passed, skipped = map(int, counts.groups())
        # What needs a device that is not here is counted, and skipped.
        assert passed >= (4 if skipped else 5), told


def run_own_tests(member, wheels, folder):
    """Run the tests of a member with it, what it and its tests need, the devkit and the tools."""
    extra = project_of(member).get("optional-dependencies", {}).get("test", ())
    names = dict.fromkeys([*needs(member, extra), *needs(DEVKIT)])
    others = [re.match(r"[\w.-]+", wish).group() for wish in extra]
    tools = [*TOOLS, *(name for name in others if name not in OURS)]
    python = make_environment(folder / "env", [wheels[name] for name in names], tools=tools)
    options = ("-q", "-p", "no:cacheprovider", "--clock=without", f"--basetemp={folder / 'temp'}")
    told = run("env", "OMP_NUM_THREADS=1", python, "-m", "pytest", *options, member, cwd=ROOT)
    assert re.search(r"^\d+ passed", told, re.MULTILINE), told


def test_the_tests_of_a_small_member_run_alone(wheels, tmp_path):
    run_own_tests(OURS["dovetail-sched-fcfs"], wheels, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("member", [pytest.param(one, id=relative(one)) for one in members()])
def test_the_tests_of_a_member_run_alone(member, wheels, tmp_path):
    run_own_tests(member, wheels, tmp_path)


def test_the_environment_has_nothing_more(wheels, tmp_path):
    python = make_environment(tmp_path / "environment", [wheels["dovetail-core"]])
    program = (
        "import importlib.util as u, json; names = ('torch', 'numpy', 'transformers', 'pytest',"
        "'dovetail_cpu', 'pydantic'); print(json.dumps([n for n in names if u.find_spec(n)]))"
    )
    assert run(python, "-c", program, cwd=tmp_path).strip() == '["pydantic"]'


def test_every_member_is_tried():
    assert len(OURS) >= 7
    assert ROOT / "core" in OURS.values()
