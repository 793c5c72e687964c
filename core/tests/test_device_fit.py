"""Plugins that do not support the platform's device are rejected with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.errors import PluginError
from dovetail.plugins.selection import (
    NOT_TRIED,
    REJECTED,
    SELECTED,
    Criteria,
    choose,
    choose_attention,
    choose_platform,
    explain,
)
from dovetail_devkit.fakes.attention import FakeAttentionBackend

PARTS = """
from dovetail.interfaces import Platform, PlatformInfo, Probe
from dovetail_devkit.fakes.attention import FakeAttentionBackend
from dovetail_devkit.fakes.ops import FakeOps

class Box(Platform):
    info = PlatformInfo(name="box", device_type="box")
    @classmethod
    def probe(cls):
        return Probe(usable=True)
    def capabilities(self):
        return frozenset({"device.box"})
    def total_memory_bytes(self, local_rank=0):
        return 1

class Absent(Box):
    @classmethod
    def probe(cls):
        return Probe(usable=False, reasons=("no such chip", "no driver"))

class Anywhere(FakeOps):
    pass

class Elsewhere(FakeOps):
    device_types = frozenset({"other"})

def no():
    return Probe(usable=False, reasons=("no compiler",))
"""
MANIFEST = """
[[plugin]]
kind = "ops"
name = "needy"
needs = ["device.other"]
rank = 3
[[plugin]]
kind = "ops"
name = "elsewhere"
rank = 2
[[plugin]]
kind = "ops"
name = "probed"
probe = "dovetail_box.parts:no"
rank = 1
"""
REFUSALS = {
    "needy": "the plugin needs device.other, which this platform does not provide",
    "elsewhere": "it supports other, but the platform's device is box",
    "probed": "no compiler",
}


@pytest.fixture
def box(plugin_site):
    """Return a registry with four ops plugins, and a platform that supports one of them."""
    ops = {name: ".parts:Anywhere" for name in ("needy", "probed", "fitting")}
    entries = {
        "platform": {"box": ".parts:Box", "absent": ".parts:Absent"},
        "ops": {**ops, "elsewhere": ".parts:Elsewhere"},
    }
    plugin_site.add("dovetail-box", entries, manifest=MANIFEST, parts=PARTS)
    registry = plugin_site.registry()
    return registry, choose_platform(registry, "auto")


def test_a_plugin_for_another_device_is_skipped_without_a_failure_report(box):
    registry, platform = box
    explanation = explain(registry, "ops", Criteria(references=("auto",), platform=platform))
    assert [(verdict.name, verdict.state) for verdict in explanation.verdicts] == [
        ("needy", REJECTED),
        ("elsewhere", REJECTED),
        ("probed", REJECTED),
        ("fitting", SELECTED),
    ]
    message = {verdict.name: verdict.reasons for verdict in explanation.verdicts}
    assert all(message[name] == (reason,) for name, reason in REFUSALS.items())
    assert choose(registry, platform, "ops", "auto") is registry.load("ops", "fitting")
    assert not registry.set_aside


@pytest.mark.parametrize("name", REFUSALS)
def test_the_error_for_an_explicit_plugin_for_another_device_lists_alternatives(name, box):
    registry, platform = box
    picked = explain(registry, "ops", Criteria(references=(name,), platform=platform))
    states = {verdict.name: verdict.state for verdict in picked.verdicts}
    assert states.pop(name) == REJECTED and set(states.values()) == {NOT_TRIED}
    assert REFUSALS[name] in picked.error
    assert picked.error.endswith("Plugins that can be used here: fitting.")
    with pytest.raises(PluginError) as rejection:
        choose(registry, platform, "ops", name)
    assert str(rejection.value) == picked.error


def test_if_no_plugin_supports_the_device_every_reason_is_reported(plugin_site):
    manifest = MANIFEST.replace("dovetail_box", "dovetail_none")
    entries = {
        "platform": {"box": ".parts:Box"},
        "ops": {
            "needy": ".parts:Anywhere",
            "elsewhere": ".parts:Elsewhere",
            "probed": ".parts:Anywhere",
        },
    }
    plugin_site.add("dovetail-none", entries, manifest=manifest, parts=PARTS)
    registry = plugin_site.registry()
    platform = choose_platform(registry, "box")
    with pytest.raises(PluginError) as rejection:
        choose(registry, platform, "ops", "auto")
    assert all(reason in str(rejection.value) for reason in REFUSALS.values())
    with pytest.raises(PluginError, match=r"platform's device is box\.$"):
        choose(registry, platform, "ops", "elsewhere")


def test_the_error_for_an_unusable_platform_lists_usable_platforms(box):
    registry, _ = box
    with pytest.raises(PluginError) as rejection:
        choose_platform(registry, "absent")
    message = "it cannot be used here: no such chip; no driver. Plugins that can be used here: box."
    assert message in str(rejection.value)


def test_the_error_for_an_unsuitable_attention_backend_lists_suitable_backends(plugin_site):
    parts = PARTS.replace("class Anywhere(FakeOps):", "class Any(FakeAttentionBackend):")
    plugin_site.add("dovetail-box", {"attention": {"any": ".parts:Any"}}, parts=parts)
    registry = plugin_site.registry()
    platform = __import__("dovetail_box.parts").parts.Box()
    requirements = _requirements()
    assert choose_attention(registry, platform, "auto", requirements) is registry.load(
        "attention", "any"
    )
    with pytest.raises(PluginError) as rejection:
        choose_attention(registry, platform, NarrowAttention, requirements)
    assert "head size 8 is not supported" in str(rejection.value)
    assert str(rejection.value).endswith("Plugins that can be used here: any.")


class NarrowAttention(FakeAttentionBackend):
    """A backend that supports head size 3 only."""

    name = "narrow"
    capabilities = replace(FakeAttentionBackend.capabilities, head_sizes=frozenset({3}))


def _requirements():
    from dovetail.interfaces import AttentionRequirements

    return AttentionRequirements(
        device_type="box",
        dtype="float32",
        kv_cache_dtype="float32",
        head_size=8,
        num_heads=2,
        num_kv_heads=1,
        block_size=16,
    )
