"""Attention requirements of a model, from config.json and from the worker."""

from __future__ import annotations

import pytest

from dovetail.config import EngineArgs
from dovetail.engine.choice import explain_choice
from dovetail.plugins import PluginRegistry
from dovetail.plugins.attention_requirements import read_attention_facts
from dovetail.plugins.selection import choose_platform
from dovetail_devkit.tiny_model import write_tiny_llama

HEADS = {"num_attention_heads": 4, "hidden_size": 32}


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({}, False),
        ({"sliding_window": 9}, True),
        ({"sliding_window": None}, False),
        ({"sliding_window": 9, "use_sliding_window": False}, False),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, True),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, False),
        ({"sliding_window": 9, "max_window_layers": 1}, False),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 2}, False),
        ({"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)
def test_the_sliding_window_is_read_from_config_json(fields, windowed):
    info = read_attention_facts({**HEADS, "num_hidden_layers": 2, **fields})
    assert info.sliding_window is windowed


def test_attention_head_counts_are_read_with_their_defaults():
    info = read_attention_facts(HEADS)
    assert (info.head_size, info.num_heads, info.num_kv_heads) == (8, 4, 4)
    nested = read_attention_facts({"text_config": {**HEADS, "head_dim": 16}})
    assert nested.head_size == 16
    assert read_attention_facts({**HEADS, "attn_logit_softcapping": 50.0}).soft_cap
    assert read_attention_facts({"vocab_size": 7}) is None
    latent = read_attention_facts({**HEADS, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert (latent.head_size, latent.num_heads, latent.num_kv_heads) == (576, 4, 1)
    assert latent.mla and not info.mla


@pytest.mark.costly
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": 9}),
        ("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "max_window_layers": 1}),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
        ),
        ("Qwen3ForCausalLM", {"num_key_value_heads": 4}),
    ],
)
def test_requirements_from_config_json_equal_those_of_the_worker(
    architecture, fields, tmp_path, monkeypatch
):
    worker = pytest.importorskip("dovetail_torch.worker")
    contexts = pytest.importorskip("dovetail_devkit.contexts")
    model = write_tiny_llama(tmp_path, architectures=[architecture], **fields)
    requirements_used = []
    choose_one = worker.choose_attention

    def spy(plugins, platform, reference, ask):
        requirements_used.append(ask)
        return choose_one(plugins, platform, reference, ask)

    monkeypatch.setattr(worker, "choose_attention", spy)
    platform = choose_platform(PluginRegistry(), "cpu")
    context = contexts.make_worker_context(model, platform, load_format="dummy")
    new_worker = worker.TorchWorker(context)
    new_worker.init_device()
    new_worker.load_model()
    new_worker.shutdown()
    options = {**contexts.SMALL_ENGINE, "load_format": "dummy"}
    explanation = explain_choice("attention", EngineArgs(model=model, platform="cpu", **options))
    assert [explanation.criteria.requirements] == requirements_used


def test_explain_reports_unknown_attention_requirements_if_no_model_is_given():
    explanation = explain_choice("attention")
    assert explanation.criteria.requirements is None
    assert "--model" in explanation.criteria.why
