"""A new plugin kind needs four files: a row in the table of kinds, contract, fake and suite.

The tests copy the core and the conformance kit, add a kind with exactly these files, and use it as
users and plugin authors would, in processes that import the copies.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dovetail_devkit.contexts import write_fake_config

ROW = """    Kind(
        name="translator",
        interface="Translator",
        summary="translates a prompt",
        field="extensions.translator",
        cardinality=Cardinality.OPTIONAL,
        roles=(FRONTEND,),
        fake="FakeTranslator",
    ),
"""
UNUSED_ROW = """    Kind(
        name="translator",
        interface="Translator",
        summary="translates a prompt",
        fake="FakeTranslator",
    ),
"""
CONTRACT = '''"""The contract of a translator."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class TranslatorContext:
    """The arguments of a translator."""

    options: Mapping[str, object] = field(default_factory=dict)


class Translator(ABC):
    """Translates prompts. Translating a translation changes nothing."""

    CONTRACT: ClassVar[str] = "translator"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: TranslatorContext) -> None:
        """Make it."""

    @abstractmethod
    def translate(self, text: str) -> str:
        """Return the translation of `text`."""
'''
FAKE = '''"""The fake of the translator contract."""

from dovetail.interfaces.translator import Translator, TranslatorContext


class FakeTranslator(Translator):
    """Translates to capital letters."""

    def __init__(self, context: TranslatorContext) -> None:
        self.options = context.options

    def translate(self, text: str) -> str:
        """Return the text in capital letters."""
        return text.upper()
'''
SUITE = '''"""The conformance suite of the translator contract."""

from dovetail.interfaces.translator import Translator, TranslatorContext
from dovetail_devkit.expectation import checking, expect


@checking("translator")
def check_translator(translator_cls: type[Translator]) -> None:
    """Check a translator against its contract; raise AssertionError with the broken rule."""
    once = translator_cls(TranslatorContext()).translate("a text")
    twice = translator_cls(TranslatorContext()).translate(once)
    expect(once == twice, f"the translation of {once!r} is {twice!r}")
'''
PLUGINS = """
from dovetail_devkit.fakes.translator import FakeTranslator

class Shouting(FakeTranslator):
    pass

class Stuttering(FakeTranslator):
    def translate(self, text):
        return text + text
"""
SELECT = """
import sys
from dovetail.config import EngineArgs
from dovetail.engine.choice import criteria_of
from dovetail.engine.plugin_choices import check_plugin_choices, make_registry
from dovetail.interfaces.translator import TranslatorContext
from dovetail.plugins.selection import select
from dovetail_devkit import load_fake, load_suite

config = EngineArgs(sys.argv[1], translator=sys.argv[2]).create_engine_config()
registry = make_registry(config)
check_plugin_choices(config, registry)
found = select(registry, "translator", criteria_of("translator", config))
print(found.name, found.cls(TranslatorContext()).translate("yes"))
load_suite("translator")(load_fake("translator"))
"""


class Tree:
    """Copies of the core and the kit, with a new kind, and a distribution with two plugins."""

    def __init__(self, root: Path, row: str = ROW) -> None:
        self.root = root
        for package in ("dovetail", "dovetail_devkit"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(_folder(package), root / package, ignore=ignored)
        table = root / "dovetail/plugin_kinds.py"
        before, start, rows = table.read_text().partition("_ROWS = (\n")
        table.write_text(before + start + row + rows)
        (root / "dovetail/interfaces/translator.py").write_text(CONTRACT)
        (root / "dovetail_devkit/fakes/translator.py").write_text(FAKE)
        (root / "dovetail_devkit/suites/translator.py").write_text(SUITE)
        (root / "acme.py").write_text(PLUGINS)
        info = root / "acme-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[dovetail.translator]\nshouting = acme:Shouting\nstuttering = acme:Stuttering\n"
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in a process that imports the copies."""
        environment = os.environ | {"PYTHONPATH": str(self.root), "COLUMNS": "300"}
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def dovetail(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the `dovetail` command."""
        return self.run("-c", "import sys; from dovetail.cli import main; main()", *arguments)

    def changes(self) -> set[str]:
        """Return the new and changed files of both packages."""
        return {
            str(path.relative_to(self.root))
            for package in ("dovetail", "dovetail_devkit")
            for path in (self.root / package).rglob("*")
            if path.is_file() and path.suffix != ".pyc" and not _is_same(path, self.root, package)
        }


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _is_same(path: Path, root: Path, package: str) -> bool:
    original = _folder(package) / path.relative_to(root / package)
    return original.is_file() and filecmp.cmp(path, original, shallow=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return Tree(tmp_path_factory.mktemp("tree"))


def test_a_new_plugin_kind_needs_only_four_files(tree):
    assert tree.changes() == {
        "dovetail/plugin_kinds.py",
        "dovetail/interfaces/translator.py",
        "dovetail_devkit/fakes/translator.py",
        "dovetail_devkit/suites/translator.py",
    }


@pytest.mark.costly
def test_a_plugin_of_a_new_kind_is_selected_by_name(tree, tmp_path):
    model = str(write_fake_config(tmp_path))
    done = tree.run("-c", SELECT, model, "shouting")
    assert done.stdout == "shouting YES\n", done.stderr
    failed = tree.run("-c", SELECT, model, "shoutin")
    assert "translator='shoutin': There is no translator plugin 'shoutin'" in failed.stderr
    assert "Did you mean 'shouting'?" in failed.stderr


@pytest.mark.costly
def test_a_plugin_of_a_new_kind_is_listed_and_explained(tree):
    listed = json.loads(tree.dovetail("plugins", "list", "translator", "--json").stdout)
    assert [item["name"] for item in listed] == ["shouting", "stuttering"]
    done = tree.dovetail("plugins", "explain", "translator", "--translator", "shouting", "--json")
    explained = json.loads(done.stdout)
    assert explained["chosen"] == ["shouting"]
    assert explained["why"] == "translator names it"
    assert [item["state"] for item in explained["verdicts"]] == ["selected", "not tried"]


@pytest.mark.costly
def test_the_conformance_kit_finds_the_suite_of_a_new_kind_by_name(tree):
    named = [f"--dovetail-plugin=translator:{name}" for name in ("shouting", "stuttering")]
    done = tree.run("-m", "pytest", "-p", "no:cacheprovider", *named)
    assert done.returncode == 1
    assert "translator:shouting: 4 passed, 0 failed" in done.stdout
    assert "translator:stuttering: 3 passed, 1 failed" in done.stdout
    assert "the translation of 'a texta text' is" in done.stdout


@pytest.mark.costly
def test_explain_reports_that_the_engine_does_not_use_a_new_kind(tmp_path):
    tree = Tree(tmp_path / "tree", UNUSED_ROW)
    done = tree.dovetail("plugins", "explain", "translator")
    assert done.returncode == 0
    assert "no part of the engine uses plugins of this kind yet" in done.stdout
    assert "shouting" in done.stdout
