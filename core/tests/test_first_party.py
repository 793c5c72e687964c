"""Third-party packages run no code unless the user names or allows them."""

import logging
from importlib.metadata import distributions

import pytest

from dovetail.config.model_sources import find_model
from dovetail.errors import PluginError
from dovetail.plugins import KINDS, PluginPolicy, PluginRegistry
from dovetail.plugins.metadata.commands import find_commands
from dovetail.plugins.metadata.discovery import discover
from dovetail.plugins.metadata.first_party import is_first_party
from dovetail.plugins.selection import choose, choose_platform
from dovetail_devkit.doctor import WARNING
from dovetail_devkit.doctor.registrations import check_registrations, plugins_to_try
from dovetail_devkit.fakes.platform import FakePlatform

CANARY = "raise AssertionError('an outside package was imported')\n"
PARTS = """
from dovetail.interfaces import Platform, PlatformInfo, Policy, Probe

class Fair(Policy):
    pass

class Box(Platform):
    info = PlatformInfo(name="box", device_type="box")
    @classmethod
    def probe(cls):
        return Probe(usable=True)
    def capabilities(self):
        return frozenset()
    def total_memory_bytes(self, local_rank=0):
        return 1
"""
LOOKALIKES = ["Dovetail_Evil", "dovetail-evil", "dovetail-a-evil", "dovetai1-a", "acme"]


def table(kind, name, **more):
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in more.items()]
    return "\n".join(["[[plugin]]", f'kind = "{kind}"', f'name = "{name}"', *lines, ""])


def add_unimportable(site, name, entries, **more):
    """Install a distribution that must not be imported, with a probe and a rank for each plugin."""
    package = name.replace("-", "_")
    tables = [
        table(kind, target, rank=99, probe=f"{package}:probe")
        for kind, targets in entries.items()
        if kind in KINDS
        for target in targets
    ]
    site.add(name, entries, manifest="\n".join(tables), init=CANARY, **more)


@pytest.fixture
def members(plugin_site):
    plugin_site.add(
        "dovetail-a",
        {"platform": {"box": ".parts:Box"}, "policy": {"fair": ".parts:Fair"}},
        parts=PARTS,
    )
    return plugin_site


@pytest.mark.parametrize(
    ("distribution", "target", "expected"),
    [
        ("dovetail-cpu", "dovetail_cpu.platform:X", True),
        ("Dovetail_CPU", "dovetail_cpu:X", True),
        ("dovetail.cpu", "dovetail_cpu:X", True),
        ("dovetail-core", "dovetail.scheduling:X", True),
        ("dovetail-cpu", "dovetail_cpu_evil:X", False),
        ("dovetail-cpu", "dovetail_cuda:X", False),
        ("dovetail-cpu-evil", "dovetail_cpu:X", False),
        ("Dovetail_Evil", "dovetail_evil:X", False),
        ("dovetail", "dovetail:X", False),
        ("dovetai1-cpu", "dovetail_cpu:X", False),
        ("", "dovetail_cpu:X", False),
    ],
)
def test_first_party_distributions_are_listed_with_their_packages(distribution, target, expected):
    assert is_first_party(distribution, target) is expected


@pytest.mark.parametrize("name", LOOKALIKES)
@pytest.mark.parametrize("no_plugins", [False, True])
def test_an_installed_third_party_package_is_not_imported(members, name, no_plugins):
    entries = {kind: {"box": ":X", "fair": ":X", "auto": ":X"} for kind in KINDS}
    add_unimportable(members, name, entries)
    registry = members.registry(policy=PluginPolicy(no_plugins=no_plugins))
    assert type(choose_platform(registry, "auto")).__module__ == "dovetail_a.parts"
    assert registry.load("policy", "fair").__module__ == "dovetail_a.parts"
    assert choose(registry, FakePlatform(), "policy", "auto").__module__ == "dovetail_a.parts"
    assert [item.distribution for kind in KINDS for item in registry.automatic(kind)] == [
        "dovetail-a",
        "dovetail-a",
    ]
    if no_plugins:
        with pytest.raises(PluginError, match="no_plugins"):
            registry.probe("platform", f"box@{name}")
        tried = [item.distribution for item in plugins_to_try(registry)]
        assert tried == ["dovetail-a", "dovetail-a"]


def test_an_allowed_package_is_probed_and_a_package_that_the_user_names_is_loaded(members):
    members.add("acme", {"platform": {"mine": ".parts:Box"}}, parts=PARTS)
    allowed = members.registry(policy=PluginPolicy(allow=("platform:*@acme",)))
    assert type(choose_platform(allowed, "mine")).__module__ == "acme.parts"
    assert [item.name for item in allowed.automatic("platform")] == ["box", "mine"]


def test_a_third_party_plugin_cannot_take_a_first_party_name_and_is_reported(members, caplog):
    add_unimportable(members, "acme", {"policy": {"fair": ":Fair"}})
    registry = members.registry()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert registry.resolve("policy", "fair").distribution == "dovetail-a"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "'fair' of dovetail-a is used; acme 1.0 has" in warning and "'fair@acme'" in warning
    assert registry.warnings == (warning,)
    actual = [
        check_registration
        for check_registration in check_registrations(registry)
        if check_registration.subject == "names"
    ]
    assert [item.verdict for item in actual] == [WARNING] and "acme" in actual[0].text
    denying = members.registry(policy=PluginPolicy(deny=("*:*@acme",)))
    assert denying.warnings == ()


def test_selecting_a_plugin_name_of_two_third_party_packages_is_an_error(members):
    for name in ("acme", "rival"):
        add_unimportable(members, name, {"policy": {"quick": ":Quick"}})
    registry = members.registry()
    assert registry.resolve("policy", "fair").distribution == "dovetail-a"
    with pytest.raises(PluginError, match="Write quick@acme or quick@rival"):
        registry.resolve("policy", "quick")


def test_a_first_party_platform_selects_third_party_plugins_only_if_allowed(members):
    """A third-party package can use a preferred name that no first-party package uses."""
    add_unimportable(members, "acme", {"policy": {"preferred": ":Fair"}})

    class Prefers(FakePlatform):
        def prefer(self, kind):
            return ("preferred", "preferred@acme") if kind == "policy" else ()

    Prefers.__module__ = "dovetail_a.platform"
    registry = members.registry()
    registry.bind_platform(Prefers())
    assert choose(registry, Prefers(), "policy", "auto").__module__ == "dovetail_a.parts"
    allowed = members.registry(policy=PluginPolicy(allow=("policy:preferred@acme",)))
    allowed.bind_platform(Prefers())
    assert [item.name for item in allowed.automatic("policy", ["preferred"])] == [
        "preferred",
        "fair",
    ]


# --- distributions with one name ----------------------------------------------------------------


def discover_in(*sites):
    return discover(distributions(path=[str(site) for site in sites]))


@pytest.fixture
def site_directories(plugin_site, tmp_path):
    """Return two site directories: the first precedes the second on sys.path.

    The second contains the first-party package dovetail-a.
    """
    plugin_site.add("dovetail-a", {"policy": {"fair": ".parts:Fair"}}, parts=PARTS)
    before = type(plugin_site)(tmp_path / "before")
    before.path.mkdir()
    return before, plugin_site


def test_a_package_that_copies_the_name_of_a_member_does_not_replace_it(site_directories):
    before, site = site_directories
    before.add("Dovetail_A", {"policy": {"evil": "evil_pkg:Evil"}, "platform": {"evil": "x:Y"}})
    discovered = discover_in(before.path, site.path)
    assert [item.name for item in discovered.candidates["policy"]] == ["fair"]
    assert not discovered.candidates["platform"]
    (warning,) = discovered.warnings
    assert warning.startswith("Dovetail_A 1.0 in ") and "is not used: dovetail-a 1.0" in warning


def test_a_package_with_the_name_of_a_missing_member_counts_as_third_party(plugin_site):
    plugin_site.add("dovetail-a", {"policy": {"evil": "evil_pkg:Evil"}})
    registry = plugin_site.registry()
    assert registry.automatic("policy") == []
    assert "treated as a third-party distribution" in registry.warnings[0]


@pytest.mark.parametrize(("version", "num_warnings"), [("1.0", 0), ("2.0", 1)])
def test_a_distribution_found_twice_is_listed_once(site_directories, version, num_warnings):
    """An editable installation can be found twice: in site-packages and in its source directory."""
    before, site = site_directories
    entries = {"policy": {"fair": ".parts:Fair"}}
    before.add("dovetail-a", entries, version=version, parts=PARTS)
    discovered = discover_in(before.path, site.path)
    assert [item.version for item in discovered.candidates["policy"]] == [version]
    assert len(discovered.warnings) == num_warnings


# --- model sources and commands ----------------------------------------------------------


def test_a_third_party_model_source_cannot_take_a_first_party_name(plugin_site):
    parts = (
        "from dovetail_devkit.fakes.model_source import FakeModelSource\n"
        "class Toy(FakeModelSource): ...\n"
    )
    plugin_site.add("dovetail-a", {"model_source": {"toy": ".parts:Toy"}}, parts=parts)
    plugin_site.add("acme", {"model_source": {"toy": ":Toy", "other": ":Toy"}}, init=CANARY)
    registry = PluginRegistry()
    assert registry.resolve("model_source", "toy").distribution == "dovetail-a"
    assert find_model("toy:small", registry, fetch=False) is None
    assert find_model("other", PluginRegistry(policy=PluginPolicy(no_plugins=True))) is None


@pytest.mark.parametrize("words", ["zoo.feed", "zoo", "zoo.feed.all"])
def test_a_third_party_command_cannot_take_a_first_party_name(plugin_site, words):
    plugin_site.add("dovetail-a", {"command": {"zoo.feed": ":feed"}}, init="def feed(): ...\n")
    plugin_site.add("acme", {"command": {words: ":feed", "ark": ":feed"}}, init=CANARY)
    commands = find_commands((), distributions(path=[str(plugin_site.path)]))
    assert [item.plugin.reference for item in commands.usable] == [
        "ark@acme",
        "zoo.feed@dovetail-a",
    ]
    assert [item.plugin.reference for item, _ in commands.set_aside] == [f"{words}@acme"]
