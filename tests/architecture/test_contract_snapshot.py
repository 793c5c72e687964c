"""Contract signatures are recorded in git, and a change requires a new contract version."""

from __future__ import annotations

import copy
import json

import pytest

from architecture.snapshot import (
    FILE,
    SECTIONS,
    SHARED,
    _describe,
    carriers,
    changes,
    contracts_to_raise,
    governing_contracts,
    take_snapshot,
)
from dovetail.interfaces.engine_config import CacheConfig

CHANGELOG = FILE.parents[2] / "core" / "CONTRACTS.md"
RENEW = "python tests/architecture/snapshot.py --write"


@pytest.fixture(scope="module")
def current():
    return take_snapshot()


def test_contract_signatures_match_the_snapshot(current):
    recorded = json.loads(FILE.read_text("utf-8"))
    actual = changes(recorded, current)
    lines = [f"{module}\n    " + "\n    ".join(parts) for module, parts in actual.items()]
    advice = contracts_to_raise(recorded, current) or [
        "the versions are raised: write the snapshot"
    ]
    assert not actual, "\n".join(["contracts changed:", *lines, *advice, f"then: {RENEW}"])
    assert recorded["versions"] == current["versions"], f"write the snapshot: {RENEW}"


def test_every_contract_version_has_a_line_in_the_changelog(current):
    text = CHANGELOG.read_text("utf-8")
    for contract, version in current["versions"].items():
        line = f"| {contract} | {version} |"
        assert line in text, f"say what changed: core/CONTRACTS.md lacks '{line}'"


def test_every_module_belongs_to_a_versioned_contract(current):
    modules = set(current["modules"]) - set(SECTIONS)
    orphans = [name for name in modules if not governing_contracts(name)]
    assert not orphans, f"give these a CONTRACT_VERSION, or a line in snapshot.SHARED: {orphans}"
    unknown = {c for governing in SHARED.values() for c in governing} - set(current["versions"])
    assert not unknown, f"snapshot.SHARED names unknown contracts: {unknown}"


def test_a_change_without_a_new_version_is_rejected(current):
    changed = copy.deepcopy(current)
    worker = changed["modules"]["dovetail.interfaces.worker"]["WorkerBase"]
    worker["execute_model"] = "method(self, plan, extra)"
    assert list(changes(current, changed)) == ["dovetail.interfaces.worker"]
    assert "CONTRACT_VERSION of 'worker'" in contracts_to_raise(current, changed)[0]
    changed["versions"]["worker"] = "9.9"
    assert not contracts_to_raise(current, changed)


def test_adding_an_optional_operation_needs_no_new_version(current):
    changed = copy.deepcopy(current)
    ops = changed["modules"]["dovetail.interfaces.ops"]["Ops"]
    ops["gelu"] = "optional method(self, x_TD)"
    assert not contracts_to_raise(current, changed)
    ops["rms_norm"] = "optional method(self, x_TD)"
    assert "CONTRACT_VERSION of 'ops'" in contracts_to_raise(current, changed)[0]


def test_a_change_of_a_shared_module_affects_every_contract_that_uses_it(current):
    changed = copy.deepcopy(current)
    del changed["modules"]["dovetail.plan"]["SchedulerOutput"]["leaves"]
    assert len(contracts_to_raise(current, changed)) == 2
    changed["versions"]["worker"] = "9.9"
    assert len(contracts_to_raise(current, changed)) == 1


def test_a_new_field_of_a_config_section_changes_the_contracts_that_use_it(current):
    class Planted(CacheConfig):
        eviction: str = "lru"

    changed = copy.deepcopy(current)
    section = changed["modules"]["dovetail.interfaces.engine_config"]["CacheConfig"]
    section |= {"eviction": _describe(Planted)["eviction"]}
    report = " ".join(contracts_to_raise(current, changed))
    assert section["eviction"] == "field: str = 'lru'"
    for contract in ("worker", "executor", "kv_connector", "platform", "hooks"):
        assert f"CONTRACT_VERSION of {contract!r}" in report
    for contract in ("scheduler", "tokenizer", "io_processor", "model", "attention"):
        assert f"CONTRACT_VERSION of {contract!r}" not in report


def test_contexts_contain_only_their_part_of_the_configuration(current):
    carried = carriers(current)
    assert "worker" not in carried["SchedulerConfig"] | carried["LimitsConfig"]
    assert "worker" not in carried["ModelConfig"] | carried["PluginsConfig"]
    assert carried["EngineConfig"] == {"hooks", "platform"}
    assert carried["RequestedConfig"] == {"platform"}
    assert not {"scheduler", "tokenizer", "stat_logger", "model"} & set().union(*carried.values())


def test_the_snapshot_contains_fields_methods_and_defaults(current):
    scheduler = current["modules"]["dovetail.interfaces.scheduler"]
    assert scheduler["SchedulerInterface"]["schedule"].startswith("abstract method(self)")
    assert scheduler["SchedulerLimits"]["enable_prefix_caching"].endswith("bool = True")
    assert (
        "static"
        in current["modules"]["dovetail.interfaces.attention"]["AttentionBackend"]["create_layer"]
    )
