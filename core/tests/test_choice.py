"""The plugins that an engine would select, computed without creating the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.config import EngineArgs
from dovetail.config.resolve import resolve
from dovetail.engine.choice import criteria_of, explain_choice
from dovetail.errors import ConfigError, PluginNotFoundError
from dovetail.plugins import KINDS, PluginRegistry
from dovetail.plugins.selection import choose_platform, select
from dovetail_devkit.tiny_model import write_tiny_llama


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_explain_names_the_plugins_that_the_engine_selects(kind, tmp_path):
    args = EngineArgs(model=write_tiny_llama(tmp_path))
    explanation = explain_choice(kind, args)
    assert not explanation.error
    registry = PluginRegistry()
    platform = choose_platform(registry, "auto")
    config = resolve(args.create_engine_config(), platform, registry)
    criteria = criteria_of(kind, config, platform)
    names = [item.cls for item in explanation.chosen]
    assert len(names) == len(criteria.references) - (kind == "policy" and bool(names) is False)
    for reference in criteria.references if kind not in ("scheduler", "policy") else ():
        required = replace(explanation.criteria, references=(reference,), platform=platform)
        assert names == [select(registry, kind, required).cls]
    known = {(v.name, v.distribution) for v in explanation.verdicts}
    assert known >= {(c.name, c.distribution) for c in registry.candidates(kind)}


def test_an_unknown_kind_is_rejected_with_the_nearest_name():
    with pytest.raises(PluginNotFoundError, match="Did you mean 'attention'"):
        explain_choice("atention")


def test_explain_accepts_a_policy_as_scheduler_cls_for_the_kinds_scheduler_and_policy():
    args = {"scheduler_cls": "dovetail.interfaces.policy:Policy"}
    scheduler = explain_choice("scheduler", **args)
    (taken,) = scheduler.chosen
    assert taken.target == "dovetail.scheduling.scheduler:Scheduler"
    assert "Policy is a policy" in taken.reasons[0]
    (policy,) = explain_choice("policy", **args).chosen
    assert policy.target == "dovetail.interfaces.policy:Policy"


def test_explain_checks_options_without_a_model():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        explain_choice("ops", max_num_seqs=-1)
