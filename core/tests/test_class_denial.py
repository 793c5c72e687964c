"""A `plugins_deny` rule rejects a class regardless of the name by which it is selected."""

import importlib
from pathlib import Path

import pytest

from dovetail.errors import PluginError
from dovetail.plugins import PluginPolicy

PARTS = """
from dovetail.interfaces import Policy

class FastPolicy(Policy):
    def rank(self, request, view):
        return 1

class Hidden(Policy):
    def rank(self, request, view):
        return 2
"""
OUTSIDE = """
from acme.parts import FastPolicy, FastPolicy as Alias, Hidden
from dovetail.interfaces import Policy

class Renamed(FastPolicy):
    "Another name."
    static_rank = True

class Twice(Renamed):
    pass

class Built(FastPolicy):
    def rank(self, request, view):
        return 3

class RenamedHidden(Hidden):
    pass

class BuiltOnHidden(Hidden):
    def rank(self, request, view):
        return 4

class Namespace:
    Inner = FastPolicy

Made = type("Made", (FastPolicy,), {})

class FastPolicyOfMine(Policy):
    pass
"""


@pytest.fixture
def site(plugin_site):
    init = "from acme.parts import FastPolicy as Exported\n"
    plugin_site.add("acme", {"policy": {"fast": ".parts:FastPolicy"}}, init=init, parts=PARTS)
    targets = {"mine": ":FastPolicyOfMine", "other": ":FastPolicy"}
    plugin_site.add("rival", {"policy": targets}, init=OUTSIDE)
    return plugin_site


def load(site, reference, *rules, **policy):
    registry = site.registry(policy=PluginPolicy(deny=rules, **policy))
    return registry.load("policy", reference)


NAMES = {
    "its name": "fast",
    "its name with spaces": " fast ",
    "its distribution": "fast@acme",
    "its distribution in capitals": "fast@ACME",
    "its class": "acme.parts:FastPolicy",
    "its class with dots": "acme.parts.FastPolicy",
    "its package's own export": "acme:Exported",
    "its package's own export with dots": "acme.Exported",
    "a module that re-exports it": "rival:FastPolicy",
    "an alias": "rival:Alias",
    "a nested name": "rival:Namespace.Inner",
    "another entry point": "other",
    "another entry point with its distribution": "other@rival",
    "a subclass that only renames": "rival:Renamed",
    "a subclass of that": "rival.Twice",
    "a class made by type": "rival:Made",
    "a class that is built on it": "rival:Built",
}


@pytest.mark.costly
@pytest.mark.parametrize("rule", ["policy:fast@acme", "*:*@acme", "policy:f*@Acme"])
@pytest.mark.parametrize("name", NAMES)
def test_a_denied_class_is_rejected_under_every_name(site, name, rule):
    with pytest.raises(PluginError, match="denied by the rule") as rejection:
        load(site, NAMES[name], rule)
    assert rule in str(rejection.value)
    assert load(site, "mine", rule).__name__ == "FastPolicyOfMine"
    assert load(site, NAMES[name])  # without the rule the class is loaded


@pytest.mark.parametrize("name", ["FastPolicy", "Renamed", "Built"])
def test_a_denied_class_is_rejected_when_it_is_given_as_an_object(site, name):
    cls = getattr(importlib.import_module("rival"), name)
    with pytest.raises(PluginError, match="denied by the rule 'policy:fast@acme'"):
        load(site, cls, "policy:fast@acme")
    assert load(site, cls, "policy:slow@acme") is cls


def test_an_instance_cannot_be_loaded_as_a_plugin(site):
    instance = importlib.import_module("rival").FastPolicy()
    with pytest.raises(PluginError, match="not an object of the class 'FastPolicy'"):
        load(site, instance, "*:*@acme")


def test_a_file_with_a_denied_class_is_rejected(site, tmp_path):
    (tmp_path / "own.py").write_text("from rival import FastPolicy, FastPolicyOfMine as Own\n")
    inside = site.path / "acme" / "parts.py"
    for reference in (f"{tmp_path}/own.py:FastPolicy", f"{inside}:FastPolicy"):
        with pytest.raises(PluginError, match="denied by the rule"):
            load(site, reference, "policy:fast@acme", trust_local_code=True)
    assert load(site, f"{tmp_path}/own.py:Own", "policy:fast@acme", trust_local_code=True)


def test_a_rule_for_a_distribution_applies_to_its_undeclared_classes(site):
    for name in ("rival:Hidden", "rival:RenamedHidden", "acme.parts:Hidden"):
        with pytest.raises(PluginError, match=r"acme\.parts:Hidden"):
            load(site, name, "*:*@acme")
    # A user's subclass of a class that is not a plugin is not denied.
    assert load(site, "rival:BuiltOnHidden", "*:*@acme")


def test_a_plugin_may_be_declared_by_a_module_that_re_exports_it(plugin_site):
    """The rule names the plugin, but the user names the module that defines the class."""
    plugin_site.add(
        "acme",
        {"policy": {"fast": ".api:Fast"}},
        parts=PARTS,
        api="from acme.parts import FastPolicy as Fast\n",
    )
    with pytest.raises(PluginError, match="denied by the rule 'policy:fast@acme'"):
        load(plugin_site, "acme.parts:FastPolicy", "policy:fast@acme")
    assert load(plugin_site, "acme.parts:Hidden", "policy:fast@acme")


def test_a_distribution_without_plugins_can_be_denied(plugin_site):
    plugin_site.add("acme-lib", {}, parts=PARTS)
    info = plugin_site.path / "acme_lib-1.0.dist-info"
    (info / "top_level.txt").write_text("acme_lib\n")
    with pytest.raises(PluginError, match=r"\*:\*@acme-lib"):
        load(plugin_site, "acme_lib.parts:Hidden", "*:*@acme-lib")


def test_the_no_plugins_option_rejects_classes_that_a_first_party_module_has_imported(plugin_site):
    plugin_site.add("acme", {"policy": {"fast": ".parts:FastPolicy"}}, parts=PARTS)
    source = "from acme.parts import FastPolicy\nclass Own(FastPolicy.__base__): ...\n"
    plugin_site.add("dovetail-a", {"policy": {"own": ":Own"}}, init=source)
    with pytest.raises(PluginError, match="no_plugins"):
        load(plugin_site, "dovetail_a:FastPolicy", no_plugins=True)
    assert load(plugin_site, "own", no_plugins=True)


DISGUISES = """
from acme.parts import FastPolicy
from dovetail.interfaces import Policy

class Lies(type(Policy)):
    def __getattribute__(cls, name):
        attributes = {"__module__": "numpy", "__qualname__": "Nice", "__mro__": (cls, object)}
        return attributes.get(name) or super().__getattribute__(name)

class Lying(FastPolicy, metaclass=Lies):
    pass

class Borrowing(Policy):
    rank = FastPolicy.rank

SKIPPED = ("__dict__", "__weakref__")
KEPT = {key: value for key, value in vars(FastPolicy).items() if key not in SKIPPED}
Copied = type("Copied", (Policy,), KEPT)

class Moved(FastPolicy):
    pass

Moved.__module__, Moved.__qualname__ = "dovetail.scheduling", "Scheduler"

class OwnCode(Policy):
    def rank(self, request, view):
        return 5
"""


@pytest.mark.parametrize("rule", ["policy:fast@acme", "*:*@acme"])
@pytest.mark.parametrize("name", ["Lying", "Borrowing", "Copied", "Moved"])
def test_a_class_that_hides_its_name_is_still_denied(site, rule, name):
    site.add("disguised", {"policy": {"disguise": ":OwnCode"}}, init=DISGUISES)
    registry = site.registry(policy=PluginPolicy(deny=(rule,)))
    with pytest.raises(PluginError, match="denied by the rule"):
        registry.load("policy", f"disguised:{name}")
    assert registry.load("policy", "disguised:OwnCode").__name__ == "OwnCode"


@pytest.mark.parametrize("rule", ["policy:fast@acme", "*:*@acme"])
def test_a_symbolic_link_to_a_denied_file_is_denied(site, rule, tmp_path, monkeypatch):
    acme = Path(importlib.import_module("acme.parts").__file__)
    (tmp_path / "linked_parts.py").symlink_to(acme)
    (tmp_path / "linked_package").symlink_to(acme.parent)
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = PluginPolicy(deny=(rule,), trust_local_code=True)
    registry = site.registry(policy=rules)
    for reference in (
        "linked_parts:FastPolicy",
        "linked_package.parts:FastPolicy",
        f"{tmp_path}/linked_parts.py:FastPolicy",
        f"{tmp_path}/linked_package/parts.py:FastPolicy",
    ):
        with pytest.raises(PluginError, match="denied by the rule"):
            registry.load("policy", reference)
