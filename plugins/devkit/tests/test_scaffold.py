"""Tests of new packages: their names, their files, and their tests."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dovetail.errors import PluginError, PluginNotFoundError
from dovetail.plugins import KINDS
from dovetail.plugins.contracts.checks import contract_version
from dovetail_devkit import SUITES
from dovetail_devkit.scaffold import BLUEPRINTS, get_blueprint, name_plugin, write_package
from dovetail_devkit.scaffold.blueprint import COMMAND

ROOT = Path(__file__).resolve().parents[2]
NAMES = {kind: f"begun_{kind}" for kind in BLUEPRINTS} | {"model": "BegunForCausalLM"}
RULES = ("--select", "E,F,W,I,B,UP,SIM,D,ANN,N,RUF")
IGNORED = ("--ignore", "D105,D107,D203,D213,D401,ANN401,N803,N806,RUF001,RUF002,RUF003")
IN_TESTS = ("--per-file-ignores", "tests/*:ANN", "--per-file-ignores", "tests/*:D")


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "package", "distribution", "stem"),
    [
        ("shortest_first", "shortest_first", "shortest-first", "ShortestFirst"),
        ("fair", "fair", "fair", "Fair"),
        ("NewForCausalLM", "new_for_causal_lm", "new-for-causal-lm", "NewForCausalLM"),
        ("HTTPFair", "http_fair", "http-fair", "HTTPFair"),
        ("with__two_", "with__two", "with-two", "WithTwo"),
    ],
)
def test_the_plugin_name_determines_the_names_of_package_and_distribution_and_class(
    name, package, distribution, stem
):
    plugin_name = name_plugin("policy", name)
    assert (plugin_name.package, plugin_name.distribution, plugin_name.stem) == (
        package,
        distribution,
        stem,
    )
    assert plugin_name.name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "letters"),
        ("3rd", "letters"),
        ("with-dash", "letters"),
        ("über", "letters"),
        ("_private", "letters"),
        ("class", "letters"),
        ("a" * 31, "30"),
        ("dovetail_mine", "first-party"),
        ("json", "reserved by Python"),
        ("tests", "every package"),
        ("pytest", "is already installed"),
        ("cyclopts", "pip uninstall"),
        ("_pytest", "letters"),
        ("bigram_dovetail", "already exists"),
    ],
)
def test_invalid_names_and_names_in_use_are_rejected(name, message):
    with pytest.raises(PluginError, match=message):
        name_plugin("policy", name)


@pytest.mark.parametrize("name", ["Attention", "RMSNorm", "attention"])
def test_a_name_of_an_imported_class_is_rejected_for_a_model(tmp_path, name):
    with pytest.raises(PluginError, match="which the module of the plugin imports"):
        write_package("model", name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_plugins_of_different_kinds_may_have_the_same_name():
    with pytest.raises(PluginError, match="dovetail-core"):
        name_plugin("executor", "uniproc")
    assert name_plugin("attention", "uniproc").name == "uniproc"


def test_the_error_for_an_unknown_kind_names_a_similar_kind():
    with pytest.raises(PluginError, match="Did you mean 'scheduler'"):
        get_blueprint("shceduler")
    with pytest.raises(PluginNotFoundError):
        name_plugin("nothing", "mine")


# --- files ------------------------------------------------------------------------------------


def test_an_existing_directory_is_not_changed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/precious.txt").write_text("keep me")
    with pytest.raises(PluginError, match="already exists"):
        write_package("policy", "mine", tmp_path)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["precious.txt"]


def test_a_write_error_leaves_no_files(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PluginError, match="Cannot write"):
        write_package("policy", "mine", tmp_path / "file")
    assert (tmp_path / "file").read_text() == ""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """One package of each kind."""
    folder = tmp_path_factory.mktemp("packages")
    return {kind: write_package(kind, NAMES[kind], folder) for kind in BLUEPRINTS}


@pytest.mark.costly
@pytest.mark.parametrize("kind", BLUEPRINTS)
def test_a_package_has_a_project_a_manifest_and_its_entry_points(packages, kind):
    created = packages[kind]
    written = {path.relative_to(created.folder).as_posix() for path in created.folder.rglob("*.*")}
    assert written == set(created.files)
    project = tomllib.loads((created.folder / "pyproject.toml").read_text())["project"]
    assert not project["name"].startswith("dovetail")
    assert any(item.startswith("dovetail-core>=") for item in project["dependencies"])
    (manifest_path,) = created.folder.rglob("dovetail.toml")
    entries = tomllib.loads(manifest_path.read_text())["plugin"]
    declared = {f"{entry['kind']}:{entry['name']}": entry for entry in entries}
    if kind == COMMAND:
        assert set(declared) == {"command:begun-command"} and created.plugins == ()
        entries = []
    assert {item for item in declared if not item.startswith(COMMAND)} == set(created.plugins)
    for entry in entries:
        assert contract_version(entry["kind"]) in entry["api"]
    for group, points in project["entry-points"].items():
        assert group.removeprefix("dovetail.") in {*KINDS, COMMAND}
        for target in points.values():
            module, _, name = target.partition(":")
            source = created.folder / "src" / f"{module.replace('.', '/')}.py"
            body = ast.parse(source.read_text()).body
            assert name in [getattr(node, "name", "") for node in body]
    for path in created.folder.rglob("*.*"):
        assert "$" not in path.read_text(), f"{path}: a placeholder was not replaced"


@pytest.mark.costly
@pytest.mark.parametrize("kind", BLUEPRINTS)
def test_a_package_passes_ruff_and_has_short_functions(packages, kind):
    folder = packages[kind].folder
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        [*ruff, "check", *RULES, *IGNORED, *IN_TESTS, "--no-cache", "."],
        [*ruff, "format", "--check", "--no-cache", "."],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_every_kind_with_a_suite_has_a_template():
    assert set(BLUEPRINTS) == {*SUITES, COMMAND}


# --- installed and checked --------------------------------------------------------------------


def run(command, folder, **environment):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = done.stdout[-6000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"{command}\n{output}"
    return done.stdout


def check_installed(packages, kinds, folder, *selection):
    """Install packages as a user does, then check each plugin with the conformance kit."""
    site = folder / "site"
    pip = ("pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    paths = [packages[kind].folder for kind in kinds]
    run([*pip, "--disable-pip-version-check", "--target", site, *paths], folder)
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    plugins = [plugin for kind in kinds for plugin in packages[kind].plugins]
    if not plugins:
        return threads
    options = [word for plugin in plugins for word in ("--dovetail-plugin", plugin)]
    empty = folder / "empty"
    empty.mkdir()
    output = run(["pytest", "-q", "-p", "no:cacheprovider", *selection, *options], empty, **threads)
    for plugin in plugins:
        assert f"{plugin}: " in output
    assert " 0 failed, 0 error" in output
    return threads


# The suites of some kinds have many cases in float16, which the CPU computes slowly.
QUICK = ("-k", "not float16")


@pytest.mark.costly
@pytest.mark.sampled(60)
@pytest.mark.parametrize("kind", sorted(set(BLUEPRINTS) - {COMMAND}))
def test_a_new_plugin_passes_its_suite_and_its_tests(packages, tmp_path, kind):
    threads = check_installed(packages, [kind], tmp_path, *QUICK)
    if kind != "attention":  # the test of the package is the complete suite
        tests = packages[kind].folder / "tests"
        run(["pytest", "-q", "-p", "no:cacheprovider", tests], tmp_path, **threads)


@pytest.mark.costly
def test_a_new_command_can_be_called(packages, tmp_path):
    threads = check_installed(packages, [COMMAND], tmp_path)
    tests = packages[COMMAND].folder / "tests"
    run(["pytest", "-q", "-p", "no:cacheprovider", tests], tmp_path, **threads)
    program = "import sys; from dovetail.cli import main; sys.exit(main(['begun-command']))"
    (tmp_path / "typed.py").write_text(program)
    assert "executor: 2" in run(["typed"], tmp_path, **threads)


@pytest.mark.soak
def test_all_new_plugins_can_be_installed_together(packages, tmp_path):
    check_installed(packages, list(BLUEPRINTS), tmp_path)
