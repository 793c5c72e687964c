"""Resolutions sent to other processes, versions on all ranks, earlier contract versions."""

import dataclasses
import json
import pickle
import sys

import pytest

from dovetail.errors import ContractError
from dovetail.interfaces import Policy
from dovetail.plugins import PluginRegistry, Resolution, compare_resolutions
from dovetail.plugins.contracts.checks import contract_version

PARTS = """
from dovetail.interfaces import Policy
from pydantic import BaseModel

class Options(BaseModel):
    weight: int = 1

class Fair(Policy):
    options_model = Options

class Loose(Policy):
    pass
"""
MANIFEST = '[[plugin]]\nkind = "policy"\nname = "fair"\nroles = ["engine", "worker"]\n'


@pytest.fixture
def shipped(plugin_site):
    """Return the resolutions of a plugin with options and of a plugin given by its class."""
    entries = {"policy": {"fair": ".parts:Fair", "other": ".parts:Loose"}}
    plugin_site.add("acme", entries, manifest=MANIFEST, parts=PARTS)
    registry = plugin_site.registry(options={"fair": {"weight": 3}})
    registry.load("policy", "fair")
    registry.load("policy", "acme.parts.Policy")
    return registry.resolutions


# --- resolutions in another process
# -----------------------------------------------------------------------------------


def test_plugin_resolutions_contain_only_plain_data(shipped):
    assert pickle.loads(pickle.dumps(shipped)) == shipped
    message = json.loads(json.dumps([dataclasses.asdict(item) for item in shipped]))
    assert message[0]["options"] == {"weight": 3} and message[0]["roles"] == ["engine", "worker"]
    assert message[1]["target"] == "acme.parts:Policy" and message[1]["distribution"] == ""


# --- ranks --------------------------------------------------------------------------------------


def resolution(name="fair", **changes):
    kwargs = {"kind": "policy", "target": "a:B", "distribution": "acme", "version": "1.0"}
    return Resolution(name=name, **(kwargs | changes))


def test_equal_resolutions_on_all_ranks_are_accepted():
    first, second = resolution(notes=("slow",)), resolution("other")
    assert compare_resolutions([[first, second], [second, resolution()]]) == []
    assert compare_resolutions([]) == compare_resolutions([[first]]) == []


def test_the_error_for_different_plugins_on_ranks_names_the_ranks():
    per_rank = [[resolution()], [resolution(version="1.1")], [resolution()], []]
    (problem,) = compare_resolutions(per_rank)
    assert problem == (
        "The policy 'fair' is not the same on all ranks: a:B (acme 1.0) on ranks 0, 2; "
        "a:B (acme 1.1) on rank 1; not loaded on rank 3. Install the same version on every machine."
    )
    assert compare_resolutions([[resolution(options={"w": 1})], [resolution()]])
    assert compare_resolutions([[resolution(target="a:C")], [resolution()]])


def test_front_end_plugins_are_not_compared():
    assert compare_resolutions([[resolution(roles=("frontend",))], []]) == []
    assert compare_resolutions([[resolution(roles=("worker",))], []])


# --- earlier contracts --------------------------------------------------------------------------

NOW = contract_version("policy")
OLD = """
class Oldest:
    '''Made for policy 0.0, in which rank was called key and took no view.'''
    def __init__(self):
        self.num_calls = 0
    def key(self, request):
        self.num_calls += 1
        return -request.sequence
"""


def adapt_oldest(cls):
    """Return a policy class that adapts a class of policy contract version 0.0."""

    class Adapted(Policy):
        def __init__(self):
            self.old = cls()

        def rank(self, request, view):
            return self.old.key(request)

    return Adapted


def old(site, api, **arguments):
    manifest = f'[[plugin]]\nkind = "policy"\nname = "old"\napi = "{api}"\n'
    site.add("acme", {"policy": {"old": ".parts:Oldest"}}, manifest=manifest, parts=OLD)
    return site.registry(**arguments)


def test_a_plugin_of_an_earlier_contract_version_is_adapted(plugin_site):
    registry = old(plugin_site, "==0.0", adapters={("policy", "0.0"): adapt_oldest})
    adapted = registry.load("policy", "old")
    assert issubclass(adapted, Policy)

    class Request:
        sequence = 4

    policy = adapted()
    assert policy.rank(Request(), None) == -4 and policy.old.num_calls == 1
    assert (
        "Oldest implements the policy contract 0.0 and is used with an adapter."
        in registry.resolutions[0].notes
    )


def test_a_contract_adapter_of_another_plugin_kind_is_not_used(plugin_site):
    def never(cls):
        raise AssertionError

    adapters = {("policy", "0.0"): adapt_oldest, ("ops", "0.0"): never}
    assert old(plugin_site, "<0.1", adapters=adapters).load("policy", "old")


@pytest.mark.parametrize("api", ["==0.0", ">=1.0"])
def test_the_error_for_a_contract_mismatch_names_both_versions_before_the_import(plugin_site, api):
    registry = old(plugin_site, api)
    with pytest.raises(ContractError) as rejection:
        registry.load("policy", "old")
    message = str(rejection.value)
    assert f"'old' of acme 1.0 requires version {api} of the policy contract" in message
    assert f"this core has {NOW} (and adapters for: none)" in message
    assert "acme" not in sys.modules


def test_a_class_can_declare_an_earlier_contract_version():
    class Older(Policy):
        CONTRACT_VERSION = "0.0"

        def key(self, request):
            return 7

    adapters = {("policy", "0.0"): adapt_oldest}
    adapted = PluginRegistry(distributions=[], adapters=adapters).load("policy", Older)
    assert adapted().rank(None, None) == 7
    with pytest.raises(ContractError, match=r"requires contract version 0\.0, which is older"):
        PluginRegistry(distributions=[]).load("policy", Older)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [(lambda cls: cls(), "must return a class"), (lambda cls: cls, "forward")],
)
def test_an_adapter_must_return_a_class_of_the_current_contract(adapter, message):
    class Older:
        CONTRACT_VERSION = "0.0"

    registry = PluginRegistry(distributions=[], adapters={("model", "0.0"): adapter})
    with pytest.raises(ContractError, match=message):
        registry.load("model", Older)
