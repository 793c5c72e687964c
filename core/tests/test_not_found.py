"""Errors for unknown names: suggestions, installed names and architectures."""

import pytest

from dovetail import LLM
from dovetail.errors import PluginNotFoundError, nearest
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config

PARTS = """
from collections import OrderedDict
from dataclasses import dataclass, field
from dovetail.interfaces import Policy
from dovetail.scheduling import Scheduler

class DeadlineFair(Policy):
    pass

class MyScheduler(Scheduler):
    pass

class LlamaForCausalLM:
    pass
"""
MODELS = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM"]


@pytest.fixture
def site(plugin_site):
    entries = {
        "policy": {"deadline-fair": ".parts:DeadlineFair"},
        "scheduler": {"my_scheduler": ".parts:MyScheduler"},
        "model": {name: ".parts:LlamaForCausalLM" for name in MODELS},
    }
    plugin_site.add("acme", entries, parts=PARTS)
    return plugin_site


def rejection(site, kind, name):
    with pytest.raises(PluginNotFoundError) as caught:
        site.registry().load(kind, name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("requested", "meant"),
    [
        ("deadline_fair", "deadline-fair"),
        ("Deadline Fair", "deadline-fair"),
        ("DEADLINEFAIR", "deadline-fair"),
        ("deadline.fair@acme", "deadline-fair"),
        ("dedline-fair", "deadline-fair"),
        ("my-scheduler", "my_scheduler"),
        ("MyScheduler", "my_scheduler"),
        ("zzz", ""),
    ],
)
def test_the_nearest_name_of_all_accepted_kinds_is_suggested(site, requested, meant):
    message = rejection(site, "scheduler", requested)
    if meant:
        assert f"Did you mean {meant!r}?" in message
    else:
        assert "Did you mean" not in message
    assert "deadline-fair" in message and "my_scheduler" in message


def test_the_error_for_an_unknown_name_names_the_option(site, tmp_path):
    options = {**SMALL_ENGINE, "skip_tokenizer_init": True}
    message = r"scheduler_cls \(scheduling_policy\)='deadline_fair': .*Did you mean 'deadline-fair'"
    for name in ("scheduler_cls", "scheduling_policy"):
        with pytest.raises(PluginNotFoundError, match=message):
            LLM(write_fake_config(tmp_path), **options, **{name: "deadline_fair"})


@pytest.mark.parametrize(
    ("requested", "meant"),
    [
        ("GemmaForCausalLM", ""),
        ("MixtralForCausalLM", ""),
        ("Qwen3ForCausalLM", ""),
        ("QwenForCausalLM", ""),
        ("Qwen2MoeForCausalLM", ""),
        ("OlamaForCausalLM", ""),
        ("GPT2LMHeadModel", ""),
        ("LlamaForCausalLM2", ""),
        ("LlammaForCausalLM", "LlamaForCausalLM"),
        ("LlamForCausalLM", "LlamaForCausalLM"),
        ("lamaForCausalLM", "LlamaForCausalLM"),
        ("LalmaForCausalLM", "LlamaForCausalLM"),
        ("LlamaForCausalML", "LlamaForCausalLM"),
        ("LlamaForCausalLN", "LlamaForCausalLM"),
        ("LlamaForCausal", ""),
        ("llamaforcausallm", "LlamaForCausalLM"),
        ("Qwen2ForCasualLM", "Qwen2ForCausalLM"),
    ],
)
def test_only_a_misspelled_architecture_gets_a_suggestion(site, requested, meant):
    message = rejection(site, "model", requested)
    assert f"architecture {requested!r}" in message
    assert ("Did you mean" in message) is bool(meant) and repr(meant or requested) in message
    assert f"Installed models: {', '.join(sorted(MODELS))} (acme 1.0)" in message
    assert "dovetail plugins new model" in message and len(message.splitlines()) == 3


def test_suggestions_for_module_attributes_exclude_imported_names(site):
    message = rejection(site, "policy", "acme.parts:DeadlineFare")
    assert "Did you mean 'DeadlineFair'?" in message
    assert "Classes in the module: DeadlineFair, MyScheduler, LlamaForCausalLM." in message
    for imported in ("OrderedDict", "Policy,", "dataclass"):
        assert imported not in message
    assert "Did you mean" not in rejection(site, "policy", "acme.parts:OrderDict")


def test_suggestions_for_long_names_are_computed_quickly():
    assert nearest("x" * 10_000_000, ["x" * 30]) == ""
    assert nearest("a_b", ["ba", "A-B"]) == " Did you mean 'A-B'?"


def test_many_installed_models_give_a_message_of_bounded_length(plugin_site):
    names = [f"Family{number}{task}" for number in range(300) for task in ("Model", "ForCausalLM")]
    entries = {"model": {name: ".parts:LlamaForCausalLM" for name in names}}
    plugin_site.add("acme", entries, parts=PARTS)
    message = rejection(plugin_site, "model", "NewForCausalLM")
    listed = message.split("Installed models: ")[1]
    assert len(message) < 1000 and "Family0ForCausalLM, Family10ForCausalLM" in listed
    named = listed.count("ForCausalLM")
    assert f"and {len(names) - named} others (dovetail plugins list model)" in listed
    similar = rejection(plugin_site, "model", "Family277NewForCausalLM")
    assert len(similar) < 1000 and "Family277ForCausalLM" in similar
    assert "Family277ForCausalLM" not in listed
