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
from dovetail.plugins.first_party import FIRST_PARTY

MAX_README_LINES = 60
BROUGHT_BY_TORCH = frozenset({"triton"})  # by its builds for accelerators, under several names
BROUGHT_BY_SUBJECTS = frozenset({"dovetail_kv_memory", "dovetail_torch", "torch", "triton"})
"""What the conformance kit imports only to test a plugin that needs it."""
MEMBERS = [pytest.param(member, id=relative(member)) for member in members()]
OURS = {project_of(member)["name"]: member for member in members()}
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
    assert dict(FIRST_PARTY) == found, "write each member in dovetail.plugins.first_party"


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


def declared_by(member):
    """Names of what a member depends on; what its house members depend on counts as well."""
    declared = {requirement_name(wish) for wish in project_of(member)["dependencies"]}
    return declared.union(*(declared_by(OURS[name]) for name in declared & set(OURS)))


@pytest.mark.parametrize("member", MEMBERS)
def test_what_is_imported_is_declared(member):
    project, declared = project_of(member), declared_by(member)
    providers = importlib.metadata.packages_distributions()
    ours = {import_name(path): name for name, path in OURS.items()}
    for path in files_below(member / "src", ".py"):
        if path.name == "kernel_cases.py":
            continue  # data for the tests
        for dotted, line in imported_names(tree_of(path)):
            top = dotted.partition(".")[0]
            if top in sys.stdlib_module_names or top == import_name(member):
                continue
            names = {ours[top]} if top in ours else {n.lower() for n in providers.get(top, [top])}
            where = f"{relative(path)}:{line}"
            annotation = top == "torch" and project["name"] == "dovetail-core"
            brought = top in BROUGHT_BY_TORCH and "torch" in declared
            brought |= top in BROUGHT_BY_SUBJECTS and project["name"] == "dovetail-devkit"
            fine = annotation or brought or names & declared
            assert fine, f"{where}: {top} is not among the dependencies"
