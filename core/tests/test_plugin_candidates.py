"""Candidates for automatic selection that fail, probes, and capabilities that plugins need."""

import logging
import sys

import pytest

from dovetail.errors import PluginError, PluginLoadError, PluginNotFoundError
from dovetail.interfaces import Policy
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.selection import choose, choose_platform
from dovetail_devkit.fakes.platform import FakePlatform

PARTS = """
from dovetail.interfaces import Platform, PlatformInfo, Policy, Probe

class Fair(Policy):
    pass

class Half(Policy):
    rank = None

class Box(Platform):
    info = PlatformInfo(name="box", device_type="box")
    @classmethod
    def probe(cls):
        return Probe(usable=True)
    def capabilities(self):
        return frozenset({"box.lid"})
    def total_memory_bytes(self, local_rank=0):
        return 1
"""


def entry(name, kind="policy", **more):
    lines = [f"{key} = {value}" for key, value in more.items()]
    return "\n".join(["[[plugin]]", f'kind = "{kind}"', f'name = "{name}"', *lines, ""])


class Prefers(FakePlatform):
    """A platform with the given preferences."""

    def __init__(self, *names):
        self.names = names

    def prefer(self, kind):
        return self.names if kind == "policy" else ()


def install(site, *names, **more):
    """Install distributions that each declare a policy of the same name.

    more: maps the name of a distribution to keys of its manifest.
    """
    for name in names:
        manifest = entry(name, **more[name]) if name in more else None
        site.add(name, {"policy": {name: ".parts:Fair"}}, manifest=manifest, parts=PARTS)


# --- candidates that fail -----------------------------------------------------------------------


def test_an_automatic_candidate_that_fails_is_skipped_and_logged_once(plugin_site, caplog):
    install(plugin_site, "dovetail-a", "dovetail-b")
    (plugin_site.path / "dovetail_a" / "parts.py").write_text("1 / 0\n")
    registry = plugin_site.registry()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (
                choose(registry, FakePlatform(), "policy", "auto").__module__ == "dovetail_b.parts"
            )
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "The policy dovetail-a@dovetail-a is skipped in automatic selection: Cannot load"
    )
    assert "ZeroDivisionError" in warning
    assert registry.set_aside == (warning,)
    with pytest.raises(PluginLoadError, match="ZeroDivisionError") as failure:
        choose(registry, FakePlatform(), "policy", "dovetail-a")
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


def test_strict_mode_raises_the_error_of_a_failed_candidate(plugin_site):
    install(plugin_site, "dovetail-a", "dovetail-b")
    (plugin_site.path / "dovetail_a" / "parts.py").write_text("1 / 0\n")
    registry = plugin_site.registry(policy=PluginPolicy(strict=True))
    with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
        choose(registry, FakePlatform(), "policy", "auto")


def test_if_all_candidates_fail_every_reason_is_reported(plugin_site):
    install(plugin_site, "dovetail-a", "acme")
    (plugin_site.path / "dovetail_a" / "parts.py").write_text("1 / 0\n")
    with pytest.raises(PluginNotFoundError) as rejection:
        choose(plugin_site.registry(), Prefers("gone"), "policy", "auto")
    message = str(rejection.value)
    assert (
        "acme: third-party plugins must be requested by name, or "
        "allowed with plugins_allow=policy:acme" in message
    )
    assert "\n  - dovetail-a: Cannot load" in message


def test_a_platform_that_cannot_be_loaded_is_skipped_unless_the_user_selects_it(
    plugin_site, caplog
):
    broken = PARTS + "\nimport gone_library\n"
    plugin_site.add("dovetail-a", {"platform": {"first": ".parts:Box"}}, parts=broken)
    plugin_site.add("dovetail-b", {"platform": {"second": ".parts:Box"}}, parts=PARTS)
    registry = plugin_site.registry()
    assert type(choose_platform(registry, "auto")).__module__ == "dovetail_b.parts"
    assert "gone_library" in registry.set_aside[0] and len(caplog.records) == 1
    with pytest.raises(PluginLoadError, match="Install 'gone_library'"):
        choose_platform(registry, "first")


# --- probes -------------------------------------------------------------------------------------


def probed(site, body):
    manifest = entry("box", kind="platform", probe='"dovetail_a.probes:probe"')
    probes = f"from dovetail.interfaces import Probe\ndef probe():\n    {body}\n"
    targets = {"platform": {"box": ".parts:Box"}}
    site.add("dovetail-a", targets, manifest=manifest, parts=PARTS, probes=probes)
    site.add("dovetail-b", {"platform": {"other": ".parts:Box"}}, parts=PARTS)
    return site.registry()


def test_the_class_of_a_platform_is_not_imported_if_its_probe_fails(plugin_site):
    registry = probed(plugin_site, "return Probe(usable=False, reasons=('no lid',))")
    assert type(choose_platform(registry, "auto")).__module__ == "dovetail_b.parts"
    assert "dovetail_a.parts" not in sys.modules and registry.set_aside == ()
    with pytest.raises(PluginError, match=r"'box' was requested, but it cannot be used.*no lid"):
        choose_platform(registry, "box")


@pytest.mark.parametrize("body", ["raise OSError('driver')", "raise SystemExit(1)", "return True"])
def test_a_failed_probe_prevents_the_selection_of_another_platform(plugin_site, body):
    registry = probed(plugin_site, body)
    for reference in ("auto", "box"):
        with pytest.raises(PluginError, match=r"probe of the platform 'box' of dovetail-a 1\.0"):
            choose_platform(registry, reference)
    assert type(choose_platform(registry, "other")).__module__ == "dovetail_b.parts"


def test_probes_run_only_for_platform_selection(plugin_site):
    registry = probed(plugin_site, "raise AssertionError")
    registry.describe("platform", "box")
    assert registry.load("platform", "box").__name__ == "Box"
    assert "dovetail_a.probes" not in sys.modules


# --- needed capabilities ------------------------------------------------------------------------


def test_a_plugin_with_unmet_needs_is_rejected_before_its_import(plugin_site):
    install(plugin_site, "acme", acme={"needs": '["box.lids", "prefix_caching"]'})
    registry = plugin_site.registry()
    parts = {"platform": {"box": ".parts:Box"}}
    plugin_site.add("dovetail-box", parts, parts=PARTS)
    registry = plugin_site.registry()
    assert choose_platform(registry, "box").info.name == "box"
    with pytest.raises(PluginError) as rejection:
        registry.load("policy", "acme")
    message = str(rejection.value)
    assert "The policy 'acme' of acme 1.0 needs box.lids, which neither the core nor the" in message
    assert "platform 'box' provides. Did you mean 'box.lid'?" in message
    assert "The platform provides: box.lid." in message
    assert "acme" not in sys.modules


def test_an_unmet_device_need_is_not_reported_as_a_misspelling(plugin_site):
    install(plugin_site, "acme", acme={"needs": '["device.boxes"]'})
    manifest = entry("box", kind="platform", provides='["device.box"]')
    parts = {"platform": {"box": ".parts:Box"}}
    plugin_site.add("dovetail-box", parts, parts=PARTS, manifest=manifest)
    registry = plugin_site.registry()
    choose_platform(registry, "box")
    with pytest.raises(PluginError, match=r"provides: box.lid, device.box") as rejection:
        registry.load("policy", "acme")
    assert "Did you mean" not in str(rejection.value)


def test_the_core_or_the_platform_can_provide_what_a_plugin_needs(plugin_site):
    needs = {"needs": '["box.lid", "box.hinge", "prefix_caching"]'}
    install(plugin_site, "acme", acme=needs)
    manifest = entry("box", kind="platform", provides='["box.hinge"]')
    targets = {"platform": {"box": ".parts:Box"}}
    plugin_site.add("dovetail-box", targets, manifest=manifest, parts=PARTS)
    registry = plugin_site.registry()
    early = registry.load("policy", "acme")
    choose_platform(registry, "box")
    assert registry.load("policy", "acme") is early


def test_plugins_loaded_before_the_platform_are_checked_against_the_platform(plugin_site):
    install(plugin_site, "acme", acme={"needs": '["wings"]'})
    registry = plugin_site.registry()
    registry.load("policy", "acme")
    with pytest.raises(PluginError, match=r"needs wings, which neither the core nor"):
        registry.bind_platform(FakePlatform())


def test_a_class_without_a_manifest_can_declare_its_needs():
    class RequiresUnknownCapability(Policy):
        needs = frozenset({"wings"})

    registry = PluginRegistry(distributions=[])
    registry.bind_platform(FakePlatform())
    with pytest.raises(PluginError, match="needs wings"):
        registry.load("policy", RequiresUnknownCapability)
