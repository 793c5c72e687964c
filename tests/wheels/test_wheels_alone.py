"""Each member's wheel, alone beside what it declares, passes the kit for everything it offers."""

import re

import pytest
from wheels.clean_environment import PIP, make_environment, run

from architecture.sources import ROOT, members, project_of, relative
from dovetail.plugins.kinds import GROUP_PREFIX, KINDS

pytestmark = pytest.mark.slow

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
    run(*PIP, "wheel", "-q", *members(), *options)
    found = {path.name.partition("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
    assert set(found) == set(OURS)
    return found


@pytest.mark.parametrize("member", [pytest.param(one, id=relative(one)) for one in members()])
def test_a_wheel_alone_passes_the_kit(member, wheels, tmp_path):
    chosen = [wheels[name] for name in needs(member)]
    python = make_environment(tmp_path / "environment", chosen, tools=["pytest"])
    (package,) = (member / "src").glob("*/__init__.py")
    run(python, "-c", f"import {package.parent.name}", cwd=tmp_path)
    asked = [word for one in plugins_of(member) for word in ("--dovetail-plugin", one)]
    if not asked:
        return  # it offers data or commands, and no plugin of a kind
    empty = tmp_path / "empty"
    empty.mkdir()
    told = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked, cwd=empty)
    for plugin in plugins_of(member):
        passed = re.search(rf"^{re.escape(plugin)}: (\d+) passed", told, re.M)
        assert passed and int(passed[1]) >= 5, told


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
