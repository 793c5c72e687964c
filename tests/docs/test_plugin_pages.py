"""The plugin of every guide page can be installed, found and loaded, and passes its tests.

The code blocks of a page become a package with a dist-info directory, as pip would install it. The
tests of the page then run unchanged.
"""

from __future__ import annotations

import importlib
import inspect
import tomllib
from contextlib import ExitStack
from dataclasses import fields

import pytest
from docs.pages import GUIDE, kind_pages, page

from dovetail import errors
from dovetail.config import EngineArgs
from dovetail.interfaces import SAMPLING_CAPABILITIES
from dovetail.interfaces.sampling_support import ENGINE_FIELDS, WORKER_FIELDS
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.plugins import KINDS, PluginRegistry
from dovetail_devkit.expectation import SkipCase
from dovetail_devkit.kit import suite_cases
from dovetail_devkit.kit_subjects import Subjects
from dovetail_devkit.scaffold import BLUEPRINTS, write_package
from dovetail_devkit.scaffold.blueprint import COMMAND

MAX_LINES = 60
LONGER = {"kv_connector": 95, "executor": 70, "worker": 75}
"""Pages with longer examples: a connector is two classes in two processes, the signature of an
executor's `collective_rpc` has nine lines, and a worker has ten methods.
"""
PAGES = [pytest.param(kind_page, id=kind_page.kind) for kind_page in kind_pages()]


def declarations(first):
    """Return the entry points of a page and its manifest, or None."""
    project, *manifests = first.blocks("toml")
    return tomllib.loads(project)["project"]["entry-points"], manifests[0] if manifests else None


@pytest.mark.costly
@pytest.mark.sampled(12)
@pytest.mark.parametrize("first", PAGES)
def test_the_plugin_of_a_page_loads_and_passes_its_tests(first, install, tmp_path):
    plugin, tests, *_ = first.blocks("python")
    entry_points, manifest = declarations(first)
    files = {"__init__.py": plugin, "page_tests.py": tests}
    if manifest is not None:
        files["dovetail.toml"] = manifest
    package = f"acme_{first.kind}"
    install(package, files, entry_points)

    registry = PluginRegistry()
    names = entry_points[f"dovetail.{first.kind}"]
    for name, target in names.items():
        assert registry.load(first.kind, name).__module__ == target.partition(":")[0]
    registry.check_manifests()
    assert not [sentence for sentence in registry.set_aside if package in sentence]

    module = importlib.import_module(f"{package}.page_tests")
    actual = [test for name, test in vars(module).items() if name.startswith("test_")]
    assert actual, f"{first.path.name}: the second Python block contains no test"
    for test in actual:
        folder = tmp_path / test.__name__
        folder.mkdir()
        test(**({"tmp_path": folder} if "tmp_path" in inspect.signature(test).parameters else {}))


def test_the_scheduler_page_and_the_template_use_the_prefix_cache_in_the_same_way(tmp_path):
    """The tests of the devkit check the template itself."""
    package = write_package("scheduler", "begun", tmp_path)
    written = (package.folder / "src/begun/scheduler.py").read_text("utf-8")
    excerpts = page("scheduler").blocks("python")[2:]
    assert len(excerpts) == 2
    for excerpt in excerpts:
        assert excerpt in written
    rows = [line for line in page("scheduler").text.splitlines() if "| `" in line]
    calls = {row.split("`")[1].rpartition("cache.")[2].partition("(")[0] for row in rows}
    assert calls - {"KVCacheManager"} <= set(vars(KVCacheManager))


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["worker", "attention", "model"])
def test_the_example_of_a_page_passes_the_conformance_kit(kind, install):
    """Run the cases of `pytest --dovetail-plugin KIND:NAME`, with the kit's arguments."""
    first = page(kind)
    entry_points, manifest = declarations(first)
    files = {"__init__.py": first.blocks("python")[0]}
    install(f"acme_{kind}", files | ({"dovetail.toml": manifest} if manifest else {}), entry_points)
    (name,) = entry_points[f"dovetail.{kind}"]
    assert f"pytest --dovetail-plugin {kind}:{name}" in first.text
    registry, left_out = PluginRegistry(), []
    with ExitStack() as stack:
        subjects = Subjects(registry=registry, stack=stack)
        for case in suite_cases(kind, registry.load(kind, name), subjects):
            try:
                case.run()
            except SkipCase as reason:
                left_out.append(str(reason))
    rejected = "the engine rejects requests that need it"
    missing = [
        f"the worker does not declare '{item}'; {rejected}"
        for item in SAMPLING_CAPABILITIES.values()
    ]
    lacking = "the model declares FINAL_NORM in `lacks`"
    due = {"worker": missing, "attention": [], "model": [lacking]}
    assert [item.split(",")[0] for item in left_out] == due[kind]


def test_the_worker_page_has_a_row_for_each_sampling_parameter():
    rows = [line.split("|") for line in page("worker").text.splitlines() if line.startswith("| `")]
    indexes = {name.strip(" `"): row[2].strip(' `"') for row in rows for name in row[1].split(",")}
    due = dict.fromkeys(ENGINE_FIELDS, "the engine") | dict.fromkeys(WORKER_FIELDS, "every worker")
    due |= SAMPLING_CAPABILITIES | {"extra_args": "logits processors"}
    assert indexes == due


@pytest.mark.parametrize("first", PAGES)
def test_the_example_of_a_plugin_page_has_a_limited_number_of_lines(first):
    for block in first.blocks("python"):
        maximum = LONGER.get(first.kind, MAX_LINES)
        assert len(block.splitlines()) <= maximum, f"{len(block.splitlines())} lines"


def test_every_plugin_kind_has_a_page():
    assert {kind_page.kind for kind_page in kind_pages()} == set(KINDS)


def test_the_front_page_of_the_plugin_guide_links_to_every_page():
    text = page("README").text
    missing = [path.name for path in GUIDE.glob("*.md") if f"({path.name})" not in text]
    assert missing == ["README.md"]


def test_errors_that_the_front_page_of_the_guide_names_exist():
    rows = [line for line in page("README").text.splitlines() if line.startswith("| ")]
    named = {word for row in rows for word in row.split("`") if word.endswith("Error")}
    assert len(named) >= 5
    unknown = [name for name in named if not hasattr(errors, name)]
    assert not unknown


def test_the_annotated_manifest_is_valid(install):
    front = page("README")
    project, manifest = front.blocks("toml")
    entry_points = tomllib.loads(project)["project"]["entry-points"]
    install("acme_fast", {"__init__.py": "", "dovetail.toml": manifest}, entry_points)
    registry = PluginRegistry()
    registry.check_manifests()
    assert not [sentence for sentence in registry.set_aside if "acme_fast" in sentence]
    described = registry.describe("attention", "fast")
    keys = set(tomllib.loads(manifest)["plugin"][0])
    assert described.in_manifest and keys == set(vars(described.entry)), "one key is missing"


def test_options_that_the_front_page_of_the_guide_names_exist():
    rows = [line.split("|") for line in page("README").text.splitlines() if line.startswith("| ")]
    chosen_by = {row[1]: row[3].strip(" `") for row in rows if row[1].startswith(" [")}
    rules = {row[1].strip(" `") for row in rows if row[1].startswith(" `plugins_")}
    named = {option for option in chosen_by.values() if option.isidentifier()} | rules
    assert len(named) >= 15
    assert named <= {field.name for field in fields(EngineArgs)}


def test_every_plugin_kind_with_a_page_has_a_template():
    assert {kind_page.kind for kind_page in kind_pages()} | {COMMAND} == set(BLUEPRINTS)
