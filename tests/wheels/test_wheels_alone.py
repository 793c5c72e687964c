"""Each member's wheel, alone beside what it declares, passes the kit for everything it offers."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from wheels.clean_environment import PIP, make_environment, run

from architecture.sources import ROOT, members, project_of, relative
from dovetail.plugins.kinds import GROUP_PREFIX, KINDS

pytestmark = pytest.mark.slow

NUM_AT_ONCE = 2
OURS = {project_of(member)["name"]: member for member in members()}


def needs(member):
    """Names of the members without which this one cannot live, its own first."""
    project = project_of(member)
    wishes = [re.match(r"[\w.-]+", wish).group() for wish in project["dependencies"]]
    ours = [name for wish in wishes if wish in OURS for name in needs(OURS[wish])]
    return list(dict.fromkeys([project["name"], *ours]))


def plugins_of(member):
    groups = project_of(member).get("entry-points", {})
    kinds = {group.removeprefix(GROUP_PREFIX): points for group, points in groups.items()}
    return [f"{kind}:{name}" for kind, points in kinds.items() if kind in KINDS for name in points]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Wheels of all members, by the name of their distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    compiled = [member for member in members() if (member / "setup.py").exists()]
    others = [member for member in members() if member not in compiled]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda some: run(*PIP, "wheel", "-q", *some, *options), (compiled, others)))
    found = {path.name.partition("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
    assert set(found) == set(OURS)
    return found


def kit_says(member, wheels, folder):
    """Install a member alone, and return what the kit says of its plugins; "" if it has none."""
    chosen = [wheels[name] for name in needs(member)]
    python = make_environment(folder / "environment", chosen, tools=["pytest"])
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


@pytest.mark.parametrize("member", [pytest.param(one, id=relative(one)) for one in members()])
def test_a_wheel_alone_passes_the_kit(member, trials):
    told = trials[member].result()
    for plugin in plugins_of(member):
        counts = re.search(rf"^{re.escape(plugin)}: (\d+) passed, 0 .* (\d+) skipped", told, re.M)
        assert counts, told
        passed, skipped = map(int, counts.groups())
        # What needs a device that is not here is counted, and skipped.
        assert passed >= (4 if skipped else 5), told


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
