"""Each member is complete: pyproject, README, src, tests, one version, valid entry points."""

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
BROUGHT_BY_TORCH = frozenset({"triton"})  # builds for accelerators have different names
BROUGHT_BY_SUBJECTS = frozenset({"dovetail_kv_memory", "dovetail_torch", "torch", "triton"})
"""Packages that the conformance kit imports only to test a plugin that needs them."""
MADE_BY_TESTS = frozenset({"acme", "parts"})
"""Packages that a test writes to a temporary directory and then imports."""
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
def test_a_member_has_all_required_files(member):
    readme = member / "README.md"
    assert readme.is_file(), (
        f"write {relative(readme)}: state the purpose, the contract and how to copy the member"
    )
    num_lines = len(readme.read_text("utf-8").splitlines())
    assert num_lines <= MAX_README_LINES, (
        f"{relative(readme)}: {num_lines} lines; shorten it to one page"
    )
    assert list((member / "tests").glob("test_*.py")), f"{relative(member)}/tests has no test"
    assert f"-e ./{relative(member)}" in DEV, f"add `-e ./{relative(member)}` to dev.txt"
    assert import_name(member).startswith("dovetail")


def test_the_first_party_distributions_are_the_members():
    by_name = {name: import_name(member) for name, member in OURS.items()}
    assert dict(FIRST_PARTY) == by_name, (
        "write each member in dovetail.plugins.metadata.first_party"
    )


def test_the_requirements_name_only_members():
    editable = {line.removeprefix("-e ./") for line in DEV if line.startswith("-e ./")}
    assert editable == {relative(member) for member in members()}, (
        "dev.txt and directories disagree"
    )


@pytest.mark.parametrize("folder", [*MEMBERS, pytest.param(ROOT, id="dovetail")])
def test_all_members_have_the_same_version(folder):
    project, version = project_of(folder), project_of(ROOT)["version"]
    assert project["version"] == version, f"{project['name']} must have version {version}"
    extras = project.get("optional-dependencies", {}).values()
    requirements = [
        *project["dependencies"],
        *(requirement for extra in extras for requirement in extra),
    ]
    for requirement in requirements:
        if requirement_name(requirement) in OURS:
            message = f"{project['name']}: pin {requirement} to =={version}"
            assert requirement.endswith(f"=={version}"), message


def test_import_linter_checks_every_member():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    missing = {import_name(member) for member in members()} - set(table["root_packages"])
    advice = "add to root_packages, and to the contracts, in [tool.importlinter] of pyproject.toml"
    assert not missing, f"{advice}: {sorted(missing)}"


def test_the_meta_distribution_names_every_member():
    project = project_of(ROOT)
    extras = project["optional-dependencies"].values()
    named = {requirement_name(requirement) for requirement in project["dependencies"]}
    named |= {requirement_name(requirement) for extra in extras for requirement in extra}
    assert named >= set(OURS), f"neither needed nor an extra: {sorted(set(OURS) - named)}"


@pytest.mark.parametrize("member", MEMBERS)
def test_entry_points_name_existing_classes(member):
    groups = {"(scripts)": project_of(member).get("scripts", {})}
    groups |= project_of(member).get("entry-points", {})
    invalid = []
    for group, points in groups.items():
        for name, target in points.items():
            actual = importlib.metadata.EntryPoint(name, target, group)
            try:
                actual.load()
            except (ImportError, AttributeError) as error:
                invalid.append(f"{group}: {name} = {target!r}: {error}")
    assert not invalid, "\n".join(["write the class, or remove the entry point:", *invalid])


IMPORTED = {import_name(member): name for name, member in OURS.items()}


def declared_by(member):
    """Return the dependencies of a member, including those of the members that it depends on."""
    declared = {requirement_name(requirement) for requirement in project_of(member)["dependencies"]}
    return declared.union(*(declared_by(OURS[name]) for name in declared & set(OURS)))


def needed_by_tests(member):
    """Return the packages that the tests of a member may import: its dependencies, its extra
    `test`, and the test tools. Every member may also import the devkit.
    """
    extra = project_of(member).get("optional-dependencies", {}).get("test", ())
    names = {requirement_name(requirement) for requirement in (*extra, "dovetail-devkit")}
    names |= {project_of(member)["name"], *map(requirement_name, TOOLS)}
    own = names & set(OURS)
    return names.union(*(declared_by(OURS[name]) for name in own))


def undeclared(path, declared):
    """Yield (line, package) for each import of a package that none of `declared` provides."""
    for dotted, line in imported_names(tree_of(path)):
        top = dotted.partition(".")[0]
        providers = [IMPORTED[top]] if top in IMPORTED else PROVIDERS.get(top, [top])
        names = {requirement_name(provider) for provider in providers}
        if top not in sys.stdlib_module_names and not names & declared:
            yield line, top


@pytest.mark.costly
@pytest.mark.parametrize("member", MEMBERS)
def test_every_imported_package_is_a_declared_dependency(member):
    project, declared = project_of(member), declared_by(member) | {project_of(member)["name"]}
    extras = project.get("optional-dependencies", {})
    declared |= {requirement_name(item) for name in {*extras} - {"test"} for item in extras[name]}
    allowed = set()
    if project["name"] == "dovetail-core":
        allowed = {"torch"}  # in annotations
    elif project["name"] == "dovetail-devkit":
        allowed = BROUGHT_BY_SUBJECTS
    elif "torch" in declared:
        allowed = BROUGHT_BY_TORCH
    invalid = [
        f"{relative(path)}:{line}: {top} is not among the dependencies"
        for path in files_below(member / "src", ".py")
        if not path.name.endswith("kernel_cases.py")  # data for the tests
        for line, top in undeclared(path, declared)
        if top not in allowed
    ]
    assert not invalid, "\n".join(invalid)


@pytest.mark.costly
@pytest.mark.parametrize("member", MEMBERS)
def test_the_tests_of_a_member_import_only_its_dependencies(member):
    """Packages in `pytest.importorskip` may be missing. Modules in the directory of the test are
    allowed."""
    declared = needed_by_tests(member)
    tests = list(files_below(member / "tests", ".py"))
    others = {path.stem for path in (*tests, *files_below(member / "training", ".py"))}
    shared = {path.name.removesuffix(".py") for path in (ROOT / "tests").iterdir()}
    invalid = [
        f"{relative(path)}:{line}: {top} is neither a dependency nor in the extra `test`"
        for path in tests
        for line, top in undeclared(path, declared)
        if top not in others | MADE_BY_TESTS
    ]
    shared &= {dotted.partition(".")[0] for p in tests for dotted, _ in imported_names(tree_of(p))}
    assert not invalid, "\n".join(invalid)
    assert not shared, f"tests of {relative(member)} import {shared} from tests/: use the devkit"
