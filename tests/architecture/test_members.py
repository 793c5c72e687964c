"""Each member is whole: pyproject, README, src, tests, one version, and true entry points."""

import importlib
import importlib.metadata
import re
import sys
import tomllib

import pytest

from architecture.sources import (
    ROOT,
    files_below,
    imported_names,
    members,
    project_of,
    relative,
    tree_of,
)
from dovetail.plugins.metadata.first_party import FIRST_PARTY

MAX_README_LINES = 60
BROUGHT_BY_TORCH = frozenset({"triton"})  # by its builds for accelerators, under several names
BROUGHT_BY_SUBJECTS = frozenset({"dovetail_kv_memory", "dovetail_torch", "torch", "triton"})
"""What the conformance kit imports only to test a plugin that needs it."""
MADE_BY_TESTS = frozenset({"acme", "parts"})
"""Packages that a test writes to a temporary folder and then imports."""
MEMBERS = [pytest.param(member, id=relative(member)) for member in members()]
OURS = {project_of(member)["name"]: member for member in members()}
PROVIDERS = importlib.metadata.packages_distributions()
TOOLS = [
    line
    for line in (ROOT / "requirements/tools.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]
DEV = (ROOT / "requirements/dev.txt").read_text("utf-8").splitlines()


def requirement_name(requirement):
    return re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-")


def import_name(member):
    packages = [p.parent for p in (member / "src").glob("*/__init__.py")]
    assert len(packages) == 1, f"{relative(member)}/src must hold one package, has {packages}"
    return packages[0].name


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_is_whole(member):
    readme = member / "README.md"
    assert readme.is_file(), f"write {relative(readme)}: purpose, contract, how to copy it"
    num_lines = len(readme.read_text("utf-8").splitlines())
    assert num_lines <= MAX_README_LINES, f"{relative(readme)}: {num_lines} lines, a page at most"
    assert list((member / "tests").glob("test_*.py")), f"{relative(member)}/tests has no test"
    assert f"-e ./{relative(member)}" in DEV, f"add `-e ./{relative(member)}` to dev.txt"
    assert import_name(member).startswith("dovetail")


def test_the_first_party_distributions_are_the_members():
    found = {name: import_name(member) for name, member in OURS.items()}
    assert dict(FIRST_PARTY) == found, "write each member in dovetail.plugins.metadata.first_party"


def test_the_requirements_name_only_members():
    editable = {line.removeprefix("-e ./") for line in DEV if line.startswith("-e ./")}
    assert editable == {relative(member) for member in members()}, "dev.txt and folders disagree"


@pytest.mark.parametrize("folder", [*MEMBERS, pytest.param(ROOT, id="dovetail")])
def test_versions_are_in_lock_step(folder):
    project, version = project_of(folder), project_of(ROOT)["version"]
    assert project["version"] == version, f"{project['name']} must have version {version}"
    extras = project.get("optional-dependencies", {}).values()
    wishes = [*project["dependencies"], *(wish for extra in extras for wish in extra)]
    for wish in wishes:
        if requirement_name(wish) in OURS:
            assert wish.endswith(f"=={version}"), f"{project['name']}: pin {wish} to =={version}"


def test_import_linter_looks_at_every_member():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    missing = {import_name(member) for member in members()} - set(table["root_packages"])
    advice = "add to root_packages, and to the contracts, in [tool.importlinter] of pyproject.toml"
    assert not missing, f"{advice}: {sorted(missing)}"


def test_the_meta_distribution_names_every_member():
    project = project_of(ROOT)
    extras = project["optional-dependencies"].values()
    named = {requirement_name(wish) for wish in project["dependencies"]}
    named |= {requirement_name(wish) for extra in extras for wish in extra}
    assert named >= set(OURS), f"neither needed nor an extra: {sorted(set(OURS) - named)}"


@pytest.mark.parametrize("member", MEMBERS)
def test_entry_points_name_what_is_there(member):
    groups = {"(scripts)": project_of(member).get("scripts", {})}
    groups |= project_of(member).get("entry-points", {})
    wrong = []
    for group, points in groups.items():
        for name, target in points.items():
            found = importlib.metadata.EntryPoint(name, target, group)
            try:
                found.load()
            except (ImportError, AttributeError) as error:
                wrong.append(f"{group}: {name} = {target!r}: {error}")
    assert not wrong, "\n".join(["write the class, or take the entry point away:", *wrong])


IMPORTED = {import_name(member): name for name, member in OURS.items()}


def declared_by(member):
    """Names of what a member depends on; what the members it depends on need counts as well."""
    declared = {requirement_name(wish) for wish in project_of(member)["dependencies"]}
    return declared.union(*(declared_by(OURS[name]) for name in declared & set(OURS)))


def needed_by_tests(member):
    """Names of what the tests of a member may import: what it needs, its extra `test`, the tools.

    The devkit counts as declared for every member.
    """
    extra = project_of(member).get("optional-dependencies", {}).get("test", ())
    names = {requirement_name(wish) for wish in (*extra, "dovetail-devkit")}
    names |= {project_of(member)["name"], *map(requirement_name, TOOLS)}
    ours = names & set(OURS)
    return names.union(*(declared_by(OURS[name]) for name in ours))


def undeclared(path, declared):
    """Yield (line, package) for each import of a package that none of `declared` provides."""
    for dotted, line in imported_names(tree_of(path)):
        top = dotted.partition(".")[0]
        names = (
            {IMPORTED[top]} if top in IMPORTED else {n.lower() for n in PROVIDERS.get(top, [top])}
        )
        if top not in sys.stdlib_module_names and not names & declared:
            yield line, top


@pytest.mark.parametrize("member", MEMBERS)
def test_what_is_imported_is_declared(member):
    project, declared = project_of(member), declared_by(member) | {project_of(member)["name"]}
    allowed = set()
    if project["name"] == "dovetail-core":
        allowed = {"torch"}  # in annotations
    elif project["name"] == "dovetail-devkit":
        allowed = BROUGHT_BY_SUBJECTS
    elif "torch" in declared:
        allowed = BROUGHT_BY_TORCH
    wrong = [
        f"{relative(path)}:{line}: {top} is not among the dependencies"
        for path in files_below(member / "src", ".py")
        if path.name != "kernel_cases.py"  # data for the tests
        for line, top in undeclared(path, declared)
        if top not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("member", MEMBERS)
def test_the_tests_of_a_member_import_only_what_runs_beside_it_alone(member):
    """Packages in `pytest.importorskip` may be missing; modules beside the test may be there."""
    declared = needed_by_tests(member)
    tests = list(files_below(member / "tests", ".py"))
    beside = {path.stem for path in (*tests, *files_below(member / "training", ".py"))}
    shared = {path.name.removesuffix(".py") for path in (ROOT / "tests").iterdir()}
    wrong = [
        f"{relative(path)}:{line}: {top} is neither a dependency nor in the extra `test`"
        for path in tests
        for line, top in undeclared(path, declared)
        if top not in beside | MADE_BY_TESTS
    ]
    shared &= {dotted.partition(".")[0] for p in tests for dotted, _ in imported_names(tree_of(p))}
    assert not wrong, "\n".join(wrong)
    assert not shared, f"tests of {relative(member)} import {shared} from tests/: use the devkit"
