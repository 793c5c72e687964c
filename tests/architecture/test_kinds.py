"""The table of plugin kinds agrees with options, configuration, kit, scaffolds and documents."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module

import pytest

from dovetail.config import EngineArgs, EngineConfig, RequestedConfig
from dovetail.plugin_kinds import ROLES, Cardinality
from dovetail.plugins import KINDS, Kind
from dovetail_devkit.scaffold import BLUEPRINTS
from tests.architecture.sources import ROOT

OPTIONS = {option.name: option for option in fields(EngineArgs)}
CHOSEN = [kind for kind in KINDS.values() if kind.field]
OTHER_CHOICES = {
    "model": "`architectures` of config.json",
    "model_source": "`model`",
    "model_format": "`model`",
}
"""The kinds that no option selects, and how each is selected."""
DEFAULTS = {Cardinality.ONE: "auto", Cardinality.OPTIONAL: None, Cardinality.MANY: ()}


def _load(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("kind", CHOSEN, ids=[kind.name for kind in CHOSEN])
def test_the_option_and_the_configuration_field_of_a_plugin_kind_exist(kind: Kind) -> None:
    section, _, name = kind.field.partition(".")
    for config in (RequestedConfig, EngineConfig):
        node = config.model_fields[section].annotation
        assert name in node.model_fields, config
    if not kind.option:
        assert kind.name == "model"
        return
    default = "" if kind.option == "worker_extension_cls" else DEFAULTS[kind.cardinality]
    assert OPTIONS[kind.option].default == default
    assert OPTIONS[kind.option].metadata["help"]
    assert all(OPTIONS[other].default is None for other in kind.other_options)
    assert kind.roles and set(kind.roles) <= set(ROLES)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_each_plugin_kind_has_a_contract_a_suite_a_fake_and_a_template(kind: Kind) -> None:
    assert kind.name == _load(kind.contract).CONTRACT
    assert callable(_load(kind.suite_path)) and isinstance(_load(kind.fake_path), type)
    assert any(kind.name in blueprint.entry_points for blueprint in BLUEPRINTS.values())
    assert all(KINDS[other].field == kind.field for other in kind.also_accepts)


def test_the_page_on_plugins_lists_every_plugin_kind() -> None:
    text = (ROOT / "docs/plugins/README.md").read_text(encoding="utf-8")
    listed = [line for line in text.splitlines() if re.match(r"\| \[\w+\]\(\w+\.md\) \|", line)]
    assert listed == [
        f"| [{kind.name}]({kind.name}.md) | {kind.summary} | "
        f"{f'`{kind.option}`' if kind.option else OTHER_CHOICES[kind.name]} | "
        f"{kind.cardinality} | {', '.join(kind.roles)} |"
        for kind in KINDS.values()
    ]
