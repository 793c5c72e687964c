"""The static manifest is located, parsed and described without an import."""

import json
import sys
import time
from importlib.metadata import distributions

import pytest

from dovetail.errors import PluginLoadError
from dovetail.plugins import KINDS, PluginRegistry
from dovetail.plugins.contracts.api_range import parse_range, parse_version
from dovetail.plugins.contracts.checks import contract_version
from dovetail.plugins.metadata.manifest import PluginEntry

FAILS_ON_IMPORT = "raise AssertionError('a plugin was imported')"
FULL = """
[[plugin]]
kind = "policy"
name = "fair"
api = ">=0.1,<1"
provides = ["fairness", "fairness.weighted"]
needs = ["dtype.float32"]
probe = "acme.probes:fair"
options = "acme.options:FairOptions"
rank = 7
replaces = ["policy:fcfs@dovetail-sched-fcfs"]
roles = ["engine"]
verified = "Acme One, 2026-11-21"
"""


def broken_by(plugin_site, manifest, entries=None):
    """Install a distribution with a broken manifest. Return the reason in the error message."""
    plugin_site.add(
        "acme", entries or {"policy": {"fair": ":Fair"}}, manifest=manifest, init=FAILS_ON_IMPORT
    )
    registry = plugin_site.registry()
    with pytest.raises(PluginLoadError) as rejection:
        registry.describe("policy", "fair")
    assert "acme" not in sys.modules
    message = str(rejection.value)
    assert "the manifest of acme 1.0 is broken" in message and "acme/dovetail.toml" in message
    assert "Fix the manifest, or install another version" in message
    (sentence,) = registry.set_aside
    assert "The manifest of acme 1.0 is broken" in sentence
    return message


# --- contents -------------------------------------------------------------------------------


def test_all_manifest_keys_are_read(plugin_site):
    plugin_site.add("acme", {"policy": {"fair": ":Fair"}}, manifest=FULL, init=FAILS_ON_IMPORT)
    about = plugin_site.registry().describe("policy", "fair")
    assert about.in_manifest and not about.first_party
    assert (about.target, about.distribution, about.version) == ("acme:Fair", "acme", "1.0")
    assert about.entry == PluginEntry(
        kind="policy",
        name="fair",
        api=">=0.1,<1",
        provides=frozenset({"fairness", "fairness.weighted"}),
        needs=frozenset({"dtype.float32"}),
        probe="acme.probes:fair",
        options="acme.options:FairOptions",
        rank=7,
        replaces=("policy:fcfs@dovetail-sched-fcfs",),
        roles=frozenset({"engine"}),
        verified="Acme One, 2026-11-21",
    )
    assert str(about) == "policy 'fair' of acme 1.0"
    assert "acme" not in sys.modules


@pytest.mark.parametrize("manifest", [None, "", '[[plugin]]\nkind = "policy"\nname = "other"\n'])
def test_missing_manifest_keys_have_defaults(plugin_site, manifest):
    entries = {"policy": {"fair": ":Fair", "other": ":Other"}}
    plugin_site.add("acme", entries, manifest=manifest, init=FAILS_ON_IMPORT)
    about = plugin_site.registry().describe("policy", "fair")
    assert not about.in_manifest
    assert about.entry == PluginEntry(kind="policy", name="fair")
    assert about.entry.roles == {"frontend", "engine", "worker"}


def test_a_plugin_given_by_its_class_has_no_manifest(plugin_site):
    plugin_site.add("acme", {"policy": {"fair": ":Fair"}}, manifest=FULL, init=FAILS_ON_IMPORT)
    about = plugin_site.registry().describe("policy", "elsewhere.mod:Mine")
    assert (about.distribution, about.in_manifest, about.entry.rank) == ("", False, 0)
    assert plugin_site.registry().describe("policy", "acme:Fair").entry.rank == 7


def test_unknown_plugin_kinds_in_a_manifest_are_ignored(plugin_site):
    manifest = '[[plugin]]\nkind = "oracle"\nname = "delphi"\nfumes = true\n' + FULL
    entries = {"policy": {"fair": ":Fair"}, "oracle": {"delphi": ":Delphi"}}
    plugin_site.add("acme", entries, manifest=manifest)
    assert plugin_site.registry().describe("policy", "fair").entry.rank == 7


# --- location --------------------------------------------------------------------------------


def test_an_editable_installation_is_found_without_importing_it(plugin_site, tmp_path, monkeypatch):
    plugin_site.add(
        "acme", {"policy": {"fair": ".deep.inside:Fair"}}, manifest=FULL, init=FAILS_ON_IMPORT
    )
    source = tmp_path / "checkout" / "src"
    source.mkdir(parents=True)
    (plugin_site.path / "acme").rename(source / "acme")
    assert not plugin_site.registry().describe("policy", "fair").in_manifest
    monkeypatch.syspath_prepend(str(source))
    assert not plugin_site.registry().describe("policy", "fair").in_manifest
    url = {"url": source.parent.as_uri(), "dir_info": {"editable": True}}
    (plugin_site.path / "acme-1.0.dist-info" / "direct_url.json").write_text(json.dumps(url))
    assert plugin_site.registry().describe("policy", "fair").entry.rank == 7
    assert "acme" not in sys.modules


def test_a_manifest_belongs_to_its_distribution(plugin_site):
    plugin_site.add("acme", {"policy": {"fair": ":Fair"}}, manifest=FULL, init=FAILS_ON_IMPORT)
    plugin_site.add("borrower", {"policy": {"lent": "acme:Fair"}, "ops": {"o": "dovetail.x:Y"}})
    for name, files in (("acme", "acme/__init__.py,,\nacme/dovetail.toml,,\n"), ("borrower", "")):
        (plugin_site.path / f"{name}-1.0.dist-info" / "RECORD").write_text(files)
    url = {"url": (plugin_site.path / "elsewhere").as_uri(), "dir_info": {"editable": True}}
    (plugin_site.path / "borrower-1.0.dist-info" / "direct_url.json").write_text(json.dumps(url))
    registry = plugin_site.registry()
    registry.check_manifests()
    assert registry.set_aside == ()
    assert registry.describe("policy", "fair").in_manifest
    assert not registry.describe("policy", "lent").in_manifest
    assert not registry.describe("ops", "o").in_manifest


def test_installed_manifests_agree_with_their_plugins():
    registry = PluginRegistry()
    registry.check_manifests()
    candidates = [candidate for kind in KINDS for candidate in registry.candidates(kind)]
    own = [item for item in candidates if item.first_party]
    assert any(our.distribution == "dovetail-core" for our in own)
    assert not [text for text in registry.set_aside if "dovetail-" in text]
    for our in own:
        about = registry.describe(our.kind, our.reference)
        if about.in_manifest:
            current = parse_version(contract_version(our.kind))
            assert parse_range(about.entry.api).allows(current), about


# --- errors ----------------------------------------------------------------------

HEAD = '[[plugin]]\nkind = "policy"\nname = "fair"\n'


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("[[plugin]\n", "it cannot be read"),
        (b"\xff".decode("latin-1") + "=", "it cannot be read"),
        ("plugin = 3", "'plugin' is not an array of tables"),
        ("[plugins]", "remove the key 'plugins'"),
        (
            '[[plugin]]\nkind = "policy"\n',
            "the table does not identify a plugin; set kind and name",
        ),
        (HEAD + "ranks = 3", "'ranks' is not a known key. Did you mean 'rank'?"),
        (HEAD + "rank = true", "write an integer"),
        (HEAD + "rank = 1.5", "write an integer"),
        (HEAD + 'api = "^0.1"', "'^0.1' is not a range of versions; write a range such as"),
        (HEAD + 'needs = "graphs"', "write an array of capability ids"),
        (HEAD + 'provides = ["Has Space"]', "write an array of capability ids"),
        (HEAD + 'probe = "no_colon"', "write 'package.module:function'"),
        (HEAD + "options = 3", "write 'package.module:Model'"),
        (HEAD + 'roles = ["cook"]', "frontend and engine and worker"),
        (HEAD + 'verified = ""', "write one line of at most 200 characters"),
        (HEAD + 'verified = "a\\nb"', "write one line of at most 200 characters"),
        (HEAD + f'verified = "{"x" * 201}"', "write one line of at most 200 characters"),
        (HEAD + "verified = true", "write one line of at most 200 characters"),
        (HEAD + 'replaces = ["fcfs"]', "'kind:name@distribution'"),
        (HEAD + 'replaces = ["ops:torch@d"]', "a policy can only replace a policy"),
        (HEAD + HEAD, "policy:fair occurs twice"),
        ('[[plugin]]\nkind = "polcy"\nname = "fair"\n', "unknown kind. Did you mean 'policy'?"),
        (
            '[[plugin]]\nkind = "policy"\nname = "fare"\n',
            "has no policy 'fare'. Did you mean 'fair'?",
        ),
    ],
)
def test_the_error_for_a_broken_manifest_names_the_distribution(plugin_site, manifest, message):
    assert message in broken_by(plugin_site, manifest)


def test_all_manifest_errors_are_reported_together(plugin_site):
    message = broken_by(plugin_site, HEAD + 'rank = "x"\napi = "1"\n')
    assert "rank = 'x'" in message and "api = '1'" in message


def test_a_broken_manifest_affects_its_own_distribution_only(plugin_site):
    plugin_site.add("acme", {"policy": {"fair": ":Fair"}}, manifest="junk")
    plugin_site.add("zebra", {"policy": {"stripes": ":Stripes"}}, manifest="")
    registry = plugin_site.registry()
    assert registry.describe("policy", "stripes").distribution == "zebra"
    assert registry.set_aside == ()
    registry.check_manifests()
    assert len(registry.set_aside) == 1
    assert [c.name for c in registry.candidates("policy")] == ["fair", "stripes"]


# --- ranges of versions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (">=0.1,<1", ["0.1", "0.9"], ["1.0", "0.0"]),
        ("==0.2", ["0.2"], ["0.1", "0.3"]),
        (">= 1 , != 1.2", ["1.0", "1.3", "2.0"], ["0.9", "1.2"]),
        ("<=1.1,>0.1", ["0.2", "1.1"], ["0.1", "1.2"]),
    ],
)
def test_version_ranges_are_evaluated(text, inside, outside):
    allowed = parse_range(text)
    assert all(allowed.allows(parse_version(item)) for item in inside)
    assert not any(allowed.allows(parse_version(item)) for item in outside)


@pytest.mark.parametrize("text", ["", "1.0", ">=1.0.0", "~=1", ">=1,,<2", ">=a", None, 1])
def test_invalid_version_ranges_are_rejected(text):
    with pytest.raises(ValueError, match="write a range such as"):
        parse_range(text)


# --- discovery time -----------------------------------------------------------------------------


@pytest.mark.clock
def test_200_distributions_are_listed_within_the_time_limit_without_imports(plugin_site):
    for index in range(200):
        manifest = f'[[plugin]]\nkind = "policy"\nname = "p{index}"\nrank = {index}\n'
        entries = {"policy": {f"p{index}": f".deep:P{index}"}}
        plugin_site.add(f"plugin-{index}", entries, manifest=manifest, init=FAILS_ON_IMPORT)
    took = []
    for _ in range(3):
        start = time.perf_counter()
        registry = PluginRegistry(distributions=distributions(path=[str(plugin_site.path)]))
        registry.check_manifests()
        ranks = [
            registry.describe("policy", candidate.reference).entry.rank
            for candidate in registry.candidates("policy")
        ]
        took.append(time.perf_counter() - start)
    assert sorted(ranks) == list(range(200)) and registry.set_aside == ()
    assert not [name for name in sys.modules if name.startswith("canary_")]
    assert min(took) < 0.3
