"""The GPU page, the manifests and the plugin list agree with the recorded runs on devices."""

from __future__ import annotations

import json
import tomllib
from copy import deepcopy
from pathlib import Path

import pytest
from docs.gpu_page import (
    PAGE,
    RESULTS,
    blocks,
    keep_run,
    manifests,
    merge_runs,
    outdated,
    read_runs,
    with_verified,
)
from docs.gpu_proofs import parts_block, read_proofs
from gpu.catalog import DEVICE_PLUGINS, SECTIONS
from gpu.report import NEVER
from gpu.tables import UNVERIFIED, page_block, plugins_block, verified_text

from architecture.sources import members, project_of
from dovetail.plugin_kinds import GROUP_PREFIX, KINDS
from dovetail.plugins import PluginRegistry

ROOT = Path(__file__).resolve().parents[2]
ADVICE = "run `python tests/docs/record_gpu.py`"
RUN = {
    "format": 1,
    "date": "2026-11-30 10:00 UTC",
    "commit": "0123456789",
    "command": "python bench/gpu/check.py",
    "small": False,
    "device": {"type": "cuda", "name": "A chip"},
    "versions": {"torch": "2.11.0"},
    "seconds": 480.0,
    "sections": {
        "conformance": {
            "state": "failed",
            "why": "ops:triton",
            "seconds": 90.0,
            "metrics": [],
            "plugins": {
                "attention:triton": {"passed": 90, "skipped": 2},
                "ops:triton": {"passed": 30, "failed": 1},
                "worker:cuda": {},
                "attention:torch": {"passed": 100},
            },
            "facts": {},
            "wrong": [],
            "notes": [],
        },
        "small_model": {
            "state": "ok",
            "why": "",
            "seconds": 40.0,
            "metrics": [
                {"name": "one_h200", "value": 900.0, "unit": "", "note": ""},
                {"name": "many_h200", "value": 700.0, "unit": "", "note": ""},
                {"name": "extra", "value": 1.5, "unit": "us", "note": "of a kernel"},
            ],
            "plugins": {},
            "facts": {},
            "wrong": [],
            "notes": [],
        },
    },
}
HERE = "A chip, 2026-11-30, commit 0123456789"


def test_the_gpu_page_agrees_with_the_last_runs():
    assert outdated(read_runs()) == [], ADVICE


def test_manifests_agree_with_the_last_runs():
    runs = read_runs()
    for path in manifests():
        text = path.read_text("utf-8")
        assert with_verified(text, runs) == text, f"{path}: {ADVICE}"


def test_the_plugin_list_shows_for_device_plugins_whether_they_are_verified():
    runs, registry = read_runs(), PluginRegistry()
    for member in members():
        groups = project_of(member).get("entry-points", {})
        offered = {group.removeprefix(GROUP_PREFIX): names for group, names in groups.items()}
        for plugin in (f"{kind}:{name}" for kind in KINDS for name in offered.get(kind, ())):
            needs_device = plugin in DEVICE_PLUGINS
            assert _verified(registry, plugin) == (
                verified_text(runs, plugin) if needs_device else ""
            )


def _verified(registry: PluginRegistry, plugin: str) -> str:
    kind, _, name = plugin.partition(":")
    (candidates,) = [candidate for candidate in registry.candidates(kind) if candidate.name == name]
    return registry.entry_of(candidates).verified


def test_every_device_plugin_is_installed():
    by_name = {
        f"{kind}:{candidate.name}"
        for kind in ("platform", "worker", "attention", "ops")
        for candidate in PluginRegistry().candidates(kind)
    }
    assert set(DEVICE_PLUGINS) <= by_name


def test_a_section_without_results_is_shown_as_never_run():
    block = page_block(None)
    assert block.count("never run") == len(SECTIONS) + sum(len(item.metrics) for item in SECTIONS)
    assert plugins_block({}).count(UNVERIFIED) == len(DEVICE_PLUGINS)
    partly = page_block(RUN)
    assert "| **parity** | Do logits" in partly and "| | never run |" in partly
    assert "| **small_model** | How fast is a model of the shape of Qwen3-0.6B" in partly
    assert "GB/s | ≥ 850 | 900 |" in partly and "GB/s | ≥ 22,000 | **700** |" in partly
    assert "| | host time per step at batch size 256 | ≤ 3 ms | never run |" in partly
    assert "| | extra, of a kernel | | 1.5 us |" in partly
    assert "| | `ops:triton` | | 30 passed, 1 failed |" in partly


def test_a_plugin_is_verified_on_devices_where_its_suite_passed():
    runs = {"cuda": RUN}
    assert verified_text(runs, "attention:triton") == HERE
    assert verified_text(runs, "ops:triton") == f"fails on {HERE}"
    assert verified_text(runs, "worker:cuda") == f"fails on {HERE}"
    assert verified_text(runs, "worker:xpu") == UNVERIFIED
    other = deepcopy(RUN) | {"device": {"type": "xpu", "name": "A slate"}}
    both = verified_text({"cuda": RUN, "xpu": other}, "attention:triton")
    assert both == f"{HERE}; A slate, 2026-11-30, commit 0123456789"
    assert verified_text({"cuda": {**RUN, "small": True}}, "attention:triton") == UNVERIFIED
    absent = {"conformance": {"plugins": {"attention:triton": {"passed": 6, "skipped": 105}}}}
    assert verified_text({"cuda": {**RUN, "sections": absent}}, "attention:triton") == UNVERIFIED


def test_an_update_changes_only_the_verified_field_of_a_manifest():
    text = (
        '# A comment.\n\n[[plugin]]\nkind = "attention"\nname = "triton"\nrank = 3\n\n'
        '[[plugin]]\nkind = "policy"\nname = "triton"\n\n'
        '[[plugin]]\nkind = "ops"\nname = "triton"\nverified = "old"\nroles = ["worker"]\n'
    )
    renewed = with_verified(text, {"cuda": RUN})
    assert with_verified(renewed, {"cuda": RUN}) == renewed
    attention, policy, ops = tomllib.loads(renewed)["plugin"]
    assert attention == {"kind": "attention", "name": "triton", "rank": 3, "verified": HERE}
    assert policy == {"kind": "policy", "name": "triton"}
    assert ops["verified"] == f"fails on {HERE}" and ops["roles"] == ["worker"]
    assert renewed.startswith("# A comment.\n\n[[plugin]]\n")
    assert len(renewed.splitlines()) == len(text.splitlines()) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"small": True},
        {"device": {"type": "cpu"}},
        {"device": {"type": "fake"}},
        {"device": {"type": ""}},
    ],
)
def test_small_runs_and_cpu_runs_are_not_recorded(change):
    before = RESULTS.read_text("utf-8")
    with pytest.raises(ValueError, match="cannot be recorded"):
        keep_run({**RUN, **change})
    assert RESULTS.read_text("utf-8") == before


def test_the_last_run_of_each_device_is_kept(tmp_path, monkeypatch):
    copy = tmp_path / "gpu.json"
    copy.write_text('{"format": 1, "runs": {}}')
    monkeypatch.setattr("docs.gpu_page.RESULTS", copy)
    keep_run(RUN)
    keep_run({**RUN, "seconds": 470.0})
    assert json.loads(copy.read_text("utf-8"))["runs"]["cuda"]["seconds"] == 470.0
    shown = blocks(read_runs())
    assert "A chip; 2026-11-30" in shown["runs"] and "### A chip" in shown["results"]


def test_runs_of_single_sections_are_merged():
    sections = RUN["sections"]
    earlier = RUN | {
        "commit": "9876543210",
        "date": "2026-11-28 10:00 UTC",
        "sections": {"conformance": sections["conformance"]},
    }
    later = RUN | {"sections": {"small_model": sections["small_model"]}}
    merged = merge_runs([earlier, later])
    assert merged["commit"] == RUN["commit"] and merged["seconds"] == 130.0
    block = page_block(merged)
    assert "failed, 90 s, commit 9876543210 |" in block and "ok, 40 s |" in block
    verified = verified_text({"cuda": merged}, "attention:triton")
    assert verified.endswith("2026-11-28, commit 9876543210")
    assert merge_runs([RUN]) == RUN
    with pytest.raises(ValueError, match="different values of device"):
        merge_runs([RUN | {"device": {"type": "xpu"}}, RUN])


def test_each_proof_names_existing_tests_sections_and_plugins():
    proofs = read_proofs()
    for row in [*proofs["part"], *proofs["rejected"]]:
        assert row["tests"], row
        for test in row["tests"]:
            path, _, name = test.partition("::")
            assert f"\ndef {name}(" in (ROOT / path).read_text("utf-8"), test
        assert set(row.get("sections", ())) <= {item.name for item in SECTIONS}
        assert row.get("plugin", DEVICE_PLUGINS[0]) in DEVICE_PLUGINS
    workers = {name for name in DEVICE_PLUGINS if not name.startswith("platform:")}
    assert {part["plugin"] for part in proofs["part"] if "plugin" in part} == workers


def test_the_result_of_a_part_comes_from_its_plugin_or_sections():
    assert parts_block({}).count(f" {NEVER} |") == len(read_proofs()["part"])
    sections = {**RUN["sections"], "graphs": {"state": "ok"}}
    block = parts_block({"cuda": {**RUN, "sections": sections}})
    rows = {line.split(" | ")[0].strip("| "): line for line in block.splitlines()}
    assert rows["Device graphs"].endswith("| graphs | graphs: ok on A chip |")
    assert rows["Attention in Triton"].endswith(f"| {HERE} |")
    assert rows["Other operations in Triton"].endswith(f"| fails on {HERE} |")
    assert rows["Sleep mode, levels 1 and 2"].endswith(f"| {NEVER} |")


def test_the_gpu_page_lists_every_section():
    text = PAGE.read_text("utf-8")
    assert not [item.name for item in SECTIONS if f"**{item.name}**" not in text]
