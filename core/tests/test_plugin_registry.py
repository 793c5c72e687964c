"""Discovery, resolution and loading of fake distributions in a temporary directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dovetail.errors import (
    ContractError,
    DovetailError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
)
from dovetail.interfaces.policy import Policy
from dovetail.plugins import KINDS, PluginPolicy, PluginRegistry
from dovetail.plugins.resolving.reference import (
    FileReference,
    NamedReference,
    QualifiedReference,
    parse_reference,
)

POLICY = """
from dovetail.interfaces.policy import Policy

class Mine(Policy):
    class Inner(Policy):
        pass

class Other(Policy):
    pass

number = 3
"""

Install = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path. Its modules are removed from sys.modules after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    def write(
        name: str,
        entries: str,
        *,
        version: str = "1.2",
        metadata: str | None = None,
        **modules: str,
    ) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: decoy\n"
        (info / "METADATA").write_text(header if metadata is None else metadata)
        (info / "entry_points.txt").write_text(entries)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)

    return write


@pytest.fixture
def registry(site: Path) -> PluginRegistry:
    return PluginRegistry(distributions=distributions(path=[str(site)]))


def fresh(site: Path, *, trust_local_code: bool = False) -> PluginRegistry:
    actual = distributions(path=[str(site)])
    policy = PluginPolicy(trust_local_code=trust_local_code)
    return PluginRegistry(policy=policy, distributions=actual)


def message(call: Callable[[], object], kind: type[DovetailError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


# -- references to plugins


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fcfs", NamedReference(name="fcfs")),
        (" fcfs ", NamedReference(name="fcfs")),
        ("fcfs@some-dist", NamedReference(name="fcfs", distribution="some-dist")),
        ("int4-awq", NamedReference(name="int4-awq")),
        ("a.b:C", QualifiedReference(module="a.b", attribute="C")),
        ("a:C.D", QualifiedReference(module="a", attribute="C.D")),
        ("a.b.C", QualifiedReference(module="a.b", attribute="C", dotted=True)),
        ("/x/y.py:C", FileReference(path=Path("/x/y.py"), attribute="C")),
        ("./y.py:C", FileReference(path=Path.cwd() / "y.py", attribute="C")),
        ("y.py:C", FileReference(path=Path.cwd() / "y.py", attribute="C")),
    ],
)
def test_plugin_references_are_parsed(text: str, expected: object) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize("text", ["", "@dist", "name@", "a:b:c", "a b:C", "pkg:", ":C", "./x.py"])
def test_the_error_for_an_invalid_reference_lists_the_valid_forms(text: str) -> None:
    error = message(lambda: parse_reference(text), PluginError)
    assert ":Class" in error


# -- discovery


def test_plugin_candidates_are_ordered_and_read_from_metadata_only(
    site: Path, install: Install, registry: PluginRegistry, count_as_member: Any
) -> None:
    count_as_member("dovetail-zz", "zz")
    boom = "raise AssertionError('imported')"
    install("zeta", "[dovetail.policy]\na = zeta_mod:A\n", zeta_mod=boom)
    install("Alpha", "[dovetail.policy]\nz = alpha_mod:Z [extra]\nb=alpha_mod : B\n")
    install("dovetail-zz", "# note\n[dovetail.policy]\nq = zz:Q\n[dovetail.model]\nM = zz:M\n")
    candidates = [(c.distribution, c.name, c.target) for c in registry.candidates("policy")]
    assert candidates == [
        ("dovetail-zz", "q", "zz:Q"),
        ("Alpha", "b", "alpha_mod:B"),
        ("Alpha", "z", "alpha_mod:Z"),
        ("zeta", "a", "zeta_mod:A"),
    ]
    assert registry.candidates("policy")[0].version == "1.2"
    assert [c.name for c in registry.candidates("model")] == ["M"]
    assert registry.candidates("worker") == ()
    assert "zeta_mod" not in sys.modules


def test_other_entry_point_groups_are_ignored_and_unreadable_metadata_is_skipped(
    install: Install, registry: PluginRegistry
) -> None:
    install("other", "[console_scripts]\nrun = dovetail.cli:main\n[dovetail.unheard]\na = b:C\n")
    install("nameless", "[dovetail.policy]\na = b:C\n", metadata="Version: 1\n")
    install("classless", "[dovetail.policy]\na = b\njunk\n")
    assert all(registry.candidates(kind) == () for kind in KINDS)
    assert len(registry.set_aside) == 3
    assert any("classless 1.2 declares 'a'" in sentence for sentence in registry.set_aside)


def test_a_distribution_that_is_on_the_path_twice_is_listed_once(
    tmp_path: Path, install: Install
) -> None:
    install("Some.Dist", "[dovetail.policy]\na = first:A\n", version="2")
    second = tmp_path / "second" / "some_dist-1.dist-info"
    second.mkdir(parents=True)
    (second / "METADATA").write_text("Name: some_dist\nVersion: 1\n")
    (second / "entry_points.txt").write_text("[dovetail.policy]\na = second:A\n")
    actual = distributions(path=[str(tmp_path), str(second.parent)])
    assert PluginRegistry(distributions=actual).resolve("policy", "a").version == "2"


def test_the_error_for_an_unknown_kind_suggests_the_nearest_kind(registry: PluginRegistry) -> None:
    text = message(lambda: registry.candidates("schedular"), PluginNotFoundError)
    assert "Did you mean 'scheduler'?" in text


@pytest.mark.clock
def test_200_distributions_are_scanned_within_the_time_limit(site: Path, install: Install) -> None:
    for index in range(200):
        install(f"dist-{index}", f"[dovetail.policy]\np{index} = mod_{index}:P\n")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert (
            len(PluginRegistry(distributions=distributions(path=[str(site)])).candidates("policy"))
            == 200
        )
        times.append(time.perf_counter() - start)
    assert min(times) < 3 * 0.060


# -- resolving names


def test_resolving_a_reference_finds_the_distribution_without_an_import(
    install: Install, registry: PluginRegistry
) -> None:
    install("mine", "[dovetail.policy]\nmine = never_made:Mine\n")
    resolution = registry.resolve("policy", "mine")
    assert (resolution.target, resolution.distribution, resolution.version) == (
        "never_made:Mine",
        "mine",
        "1.2",
    )
    assert registry.resolve("policy", "never_made:Mine") == resolution
    assert registry.resolve("policy", "never_made.Mine") == resolution
    assert registry.resolve("policy", "else_where:Mine").distribution == ""
    assert registry.resolutions == ()


def test_the_error_for_an_unknown_name_lists_installed_names_and_the_syntax(
    install: Install, registry: PluginRegistry
) -> None:
    install("one", "[dovetail.policy]\nfcfs = m:A\nlifo = m:B\n[dovetail.scheduler]\nedf = m:C\n")
    install("two", "[dovetail.policy]\nprio = n:C\n")
    text = message(lambda: registry.resolve("policy", "fcsf"), PluginNotFoundError)
    assert "no policy plugin 'fcsf'. Did you mean 'fcfs'?" in text
    assert "fcfs, lifo (one 1.2); prio (two 1.2)" in text
    assert "package.module:Class" in text
    assert len(text.splitlines()) == 3
    text = message(lambda: registry.resolve("policy", "edf"), PluginNotFoundError)
    assert "have a plugin with this name: scheduler" in text
    text = message(lambda: registry.resolve("tokenizer", "x"), PluginNotFoundError)
    assert "No such plugin is installed." in text


def test_a_name_of_two_distributions_must_be_qualified(
    install: Install, registry: PluginRegistry
) -> None:
    install("Some.Sched", "[dovetail.policy]\nfcfs = first_mod:Mine\n", first_mod=POLICY)
    install("Rival.Sched", "[dovetail.policy]\nfcfs = rival_mod:Mine\n", rival_mod=POLICY)
    text = message(lambda: registry.resolve("policy", "fcfs"), PluginError)
    assert "Rival.Sched 1.2 (rival_mod:Mine), Some.Sched 1.2 (first_mod:Mine)" in text
    assert "fcfs@Rival.Sched or fcfs@Some.Sched" in text
    assert registry.load("policy", "fcfs@rival-sched").__module__ == "rival_mod"
    assert registry.resolutions[0].distribution == "Rival.Sched"
    text = message(lambda: registry.resolve("policy", "fcfs@rival"), PluginNotFoundError)
    assert "Did you mean 'Rival.Sched'?" in text and "Write fcfs@Rival.Sched" in text


def test_a_name_declared_twice_in_one_distribution_is_selected_by_class(
    install: Install, registry: PluginRegistry
) -> None:
    install("one", "[dovetail.policy]\na = m:A\na = m:B\nb = m:A\nb = m:A\n")
    text = message(lambda: registry.resolve("policy", "a"), PluginError)
    assert "Write m:A or m:B" in text
    assert registry.resolve("policy", "b").target == "m:A"


# -- loading


def test_every_form_of_a_reference_loads_the_same_class_once(
    site: Path, install: Install, registry: PluginRegistry
) -> None:
    install("mine", "[dovetail.policy]\nmine = mine_mod:Mine\n", mine_mod=POLICY)
    loaded = registry.load("policy", "mine")
    assert issubclass(loaded, Policy)
    for reference in ("mine@mine", "mine_mod:Mine", "mine_mod.Mine", loaded):
        assert registry.load("policy", reference) is loaded
    assert [r.distribution for r in registry.resolutions] == ["mine", ""]
    assert registry.resolutions[1].target == "mine_mod:Mine"
    assert fresh(site).load("policy", "mine_mod:Mine.Inner").__qualname__ == "Mine.Inner"


def test_a_dotted_reference_finds_packages_and_nested_classes(
    site: Path, registry: PluginRegistry
) -> None:
    package = site / "dotted_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mod.py").write_text(POLICY)
    assert registry.load("policy", "dotted_pkg.mod.Mine").__qualname__ == "Mine"
    assert registry.load("policy", "dotted_pkg.mod.Mine.Inner").__qualname__ == "Mine.Inner"
    targets = [resolution.target for resolution in registry.resolutions]
    assert targets == ["dotted_pkg.mod:Mine", "dotted_pkg.mod:Mine.Inner"]
    text = message(lambda: registry.load("policy", "dotted_pkg.mod.Mime"), PluginNotFoundError)
    assert "Did you mean 'Mine'?" in text
    text = message(lambda: registry.load("policy", "dotted_pkg.mod.No.Inner"), PluginNotFoundError)
    assert "'dotted_pkg.mod' is a module, not a package" in text
    text = message(lambda: registry.load("policy", "dotted_pkg.gone.Mine"), PluginNotFoundError)
    assert "no module 'dotted_pkg.gone'" in text


def test_the_error_for_a_class_in_the_users_main_module_suggests_another_module(
    registry: PluginRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModuleType("__main__")
    program.__spec__ = ModuleSpec("dovetail.engine.process.__main__", None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    text = message(lambda: registry.load("policy", "__main__:Mine"), PluginNotFoundError)
    assert "Move the class to a module" in text and "Classes in the module" not in text


def test_missing_modules_and_missing_attributes_have_different_errors(
    install: Install, registry: PluginRegistry
) -> None:
    install(
        "mine", "[dovetail.policy]\nmine = mine_too:Mime\ngone = gone_too.x:A\n", mine_too=POLICY
    )
    text = message(lambda: registry.load("policy", "gone_mod:Mine"), PluginNotFoundError)
    assert "no module 'gone_mod'" in text and "PYTHONPATH" in text
    text = message(lambda: registry.load("policy", "mine_too:Othr"), PluginNotFoundError)
    assert "module 'mine_too' was imported, but it has no attribute 'Othr'" in text
    assert "Did you mean 'Other'?" in text and "Mine, Other" in text
    text = message(lambda: registry.load("policy", "mine_too:Mine.Iner"), PluginNotFoundError)
    assert "its class 'Mine' has no attribute 'Iner'. Did you mean 'Inner'?" in text
    text = message(lambda: registry.load("policy", "mine"), PluginLoadError)
    assert "plugin 'mine' of mine 1.2" in text and "declares a class that does not exist" in text
    text = message(lambda: registry.load("policy", "gone"), PluginLoadError)
    assert "plugin 'gone' of mine 1.2" in text and "no module 'gone_too'" in text


@pytest.mark.parametrize(
    ("source", "cause", "detail"),
    [
        ("1 / 0", ZeroDivisionError, "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", SystemExit, "SystemExit: 3"),
        ("def (", SyntaxError, "SyntaxError"),
        ("import library_that_is_gone", ModuleNotFoundError, "Install 'library_that_is_gone'"),
        ("from dovetail.errors import Gone", ImportError, "ImportError"),
        ("raise BaseException", BaseException, "failed with BaseException"),
    ],
)
def test_any_exception_of_an_import_becomes_a_load_error(
    install: Install, registry: PluginRegistry, source: str, cause: type, detail: str
) -> None:
    install("bad", "[dovetail.policy]\nbad = broken_mod:Bad\n", broken_mod=source)
    with pytest.raises(PluginLoadError) as caught:
        registry.load("policy", "bad")
    assert type(caught.value.__cause__) is cause
    assert "plugin 'bad' of bad 1.2" in str(caught.value)
    assert detail in str(caught.value)
    assert registry.resolutions == ()


def test_ctrl_c_during_an_import_is_not_caught(install: Install, registry: PluginRegistry) -> None:
    install("slow", "[dovetail.policy]\nslow = slow_mod:Slow\n", slow_mod="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry.load("policy", "slow")


def test_a_failed_load_can_be_retried(
    site: Path, install: Install, registry: PluginRegistry
) -> None:
    install("late", "[dovetail.policy]\nlate = late_mod:Mine\n", late_mod="raise OSError('busy')")
    with pytest.raises(PluginLoadError, match="busy"):
        registry.load("policy", "late")
    (site / "late_mod.py").write_text(
        POLICY + "# another size, so that no stale bytecode is used\n"
    )
    assert registry.load("policy", "late").__name__ == "Mine"


def test_a_plugin_that_is_not_a_class_is_rejected(
    install: Install, registry: PluginRegistry
) -> None:
    install("mine", "[dovetail.policy]\nn = num_mod:number\n", num_mod=POLICY)
    assert "3 is an int" in message(lambda: registry.load("policy", "n"), ContractError)
    created: Any = Policy()
    text = message(lambda: registry.load("policy", created), ContractError)
    assert "not an object of the class 'Policy'" in text


def test_a_plugin_given_as_a_class_object_needs_no_distribution(registry: PluginRegistry) -> None:
    class Local(Policy):
        pass

    assert registry.load("policy", Local) is Local
    assert registry.resolutions[0].target.endswith("Local")
    with pytest.raises(ContractError, match="missing"):
        registry.load("policy", int)


# -- files


def test_local_files_are_rejected_unless_allowed(site: Path, registry: PluginRegistry) -> None:
    path = site / "afternoon.py"
    path.write_text(POLICY)
    text = message(lambda: registry.load("policy", f"{path}:Mine"), PluginError)
    assert "--trust-local-code" in text
    trusting = fresh(site, trust_local_code=True)
    own, other = (trusting.load("policy", f"{path}:{name}") for name in ("Mine", "Other"))
    assert own.__module__ == other.__module__
    assert sys.modules[own.__module__].Mine is own
    assert trusting.resolutions[0].target == f"{path}:Mine"
    path.write_text(POLICY.replace("Other", "Changed"))
    assert fresh(site, trust_local_code=True).load("policy", f"{path}:Changed")


def test_a_plugin_file_that_is_missing_or_fails_is_reported(site: Path) -> None:
    trusting = fresh(site, trust_local_code=True)
    text = message(lambda: trusting.load("policy", "./gone.py:A"), PluginNotFoundError)
    assert "does not exist" in text
    (site / "exits.py").write_text("import sys; sys.exit('bye')")
    before = set(sys.modules)
    text = message(lambda: trusting.load("policy", f"{site}/exits.py:A"), PluginLoadError)
    assert "SystemExit: bye" in text
    assert not [name for name in set(sys.modules) - before if "exits" in name]
