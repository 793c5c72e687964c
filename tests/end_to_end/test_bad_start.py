"""Starts that fail: each raises a typed error that names the plugin, the file or the weight."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    DovetailError,
    ModelError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    WeightError,
)

PLACES = {
    "platform": ("platform", "cpo", "cpu"),
    "worker_cls": ("worker", "cpuu", "cpu"),
    "executor_backend": ("executor", "uniprok", "uniproc"),
    "scheduler_cls": ("scheduler", "fcsf", "fcfs"),
    "attention_backend": ("attention", "torhc", "torch"),
    "linear_method": ("linear_method", "troch", "torch"),
    "ops": ("ops", "torsh", "torch"),
    "load_format": ("weight_loader", "safetensor", "safetensors"),
    "tokenizer_mode": ("tokenizer", "hugingface", "huggingface"),
}
GATE = "model.layers.1.mlp.gate_proj.weight"


def reject(kind, model, options, **changes):
    """Start an engine, which must raise an error of type `kind`. Return the message."""
    with pytest.raises(kind) as rejection:
        LLM(model, **(options | changes))
    assert isinstance(rejection.value, DovetailError)
    return str(rejection.value)


@pytest.fixture
def broken(model_dir, tmp_path):
    """Return a copy of the model directory that a test may damage."""
    return shutil.copytree(model_dir, tmp_path / "model")


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def shard(folder):
    """Split the weights into two files with an index. Return the names of the files."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: names[position % 2] for position, name in enumerate(sorted(weights))}
    for file in names:
        save_file({n: w for n, w in weights.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


@pytest.mark.parametrize("field", PLACES)
def test_the_error_for_an_unknown_plugin_suggests_a_similar_name(model_dir, options, field):
    kind, invalid, right = PLACES[field]
    message = reject(PluginNotFoundError, model_dir, options, **{field: invalid})
    assert f"no {kind} plugin {invalid!r}" in message
    assert f"Did you mean {right!r}?" in message and "Installed: " in message


@pytest.mark.costly
@pytest.mark.parametrize("field", PLACES)
def test_the_error_for_a_missing_module_names_it(model_dir, options, field):
    message = reject(PluginNotFoundError, model_dir, options, **{field: "no_such_module:Thing"})
    assert "no_such_module" in message


@pytest.mark.costly
@pytest.mark.parametrize("field", PLACES)
def test_a_plugin_class_of_another_kind_is_rejected(model_dir, options, field):
    message = reject(ContractError, model_dir, options, **{field: "collections:OrderedDict"})
    assert "OrderedDict" in message and "contract" in message


@pytest.mark.costly
@pytest.mark.parametrize("field", PLACES)
def test_the_error_for_a_module_that_fails_at_import_gives_the_reason(
    model_dir, options, field, tmp_path, monkeypatch
):
    (tmp_path / f"bad_{field}.py").write_text("raise RuntimeError('the license has run out')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = reject(PluginLoadError, model_dir, options, **{field: f"bad_{field}:Thing"})
    assert "the license has run out" in message


def test_the_error_for_an_unknown_option_suggests_a_similar_name(model_dir, options):
    message = reject(ConfigError, model_dir, options, schedular_cls="fcfs")
    assert "'schedular_cls'" in message and "'scheduler_cls'" in message


# --- the directory ----------------------------------------------------------------------------


def test_a_missing_model_directory_is_an_error(model_dir, options):
    sibling = str(model_dir)[:-1] + "x"
    message = reject(ModelError, sibling, options)
    assert "does not exist" in message and model_dir.name in message


def test_a_directory_without_a_config_is_an_error(tmp_path, options):
    assert "no config.json" in reject(ModelError, tmp_path, options)


def test_a_file_instead_of_a_model_directory_is_an_error(model_dir, options):
    assert "is a file" in reject(ModelError, model_dir / "config.json", options)


def test_a_hub_name_is_not_downloaded_in_offline_mode(options, monkeypatch):
    monkeypatch.setenv("DOVETAIL_OFFLINE", "1")
    message = reject(ModelError, "someone/some-model", options)
    assert "someone/some-model is not in the cache" in message
    assert "DOVETAIL_OFFLINE forbids downloads" in message


def test_a_config_that_is_not_valid_json_is_an_error(broken, options):
    (broken / "config.json").write_text("{")
    assert "config.json is not valid JSON" in reject(ModelError, broken, options)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "twisted"}}, "twisted"),
    ],
)
def test_the_error_for_an_unsupported_config_names_the_field(broken, options, change, word):
    edit_config(broken, **change)
    assert word in reject(ModelError, broken, options)


def test_a_missing_tokenizer_is_an_error(broken, options):
    (broken / "tokenizer.json").unlink()
    assert "tokenizer.json" in reject(ModelError, broken, options)


def test_the_error_for_an_unknown_architecture_lists_the_known_ones(broken, options):
    edit_config(broken, architectures=["LamaForCausalLM"])
    message = reject(PluginError, broken, options)
    assert "'LamaForCausalLM'" in message and "Did you mean 'LlamaForCausalLM'" in message
    assert "Qwen3ForCausalLM" in message and "MistralForCausalLM" in message


# --- weights ----------------------------------------------------------------------------------


def test_sharded_weights_are_loaded(broken, model_dir, options, llm):
    shard(broken)
    params = SamplingParams(max_tokens=6, temperature=0)
    with LLM(broken, **options) as opened_llm:
        tokens = opened_llm.generate("The fox", params)[0].outputs[0].token_ids
    assert tokens == llm.generate("The fox", params)[0].outputs[0].token_ids


def test_the_error_for_a_missing_shard_names_the_file(broken, options):
    names = shard(broken)
    (broken / names[1]).unlink()
    message = reject(WeightError, broken, options)
    assert names[1] in message and names[0] not in message


def test_a_directory_without_weight_files_is_an_error(broken, options):
    (broken / "model.safetensors").unlink()
    assert "model.safetensors" in reject(WeightError, broken, options)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_weights_file_is_an_error(broken, options, share):
    file = broken / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    message = reject(WeightError, broken, options)
    assert str(file) in message and "truncated" in message


def test_the_error_for_a_wrong_weight_shape_contains_both_shapes(broken, options):
    def change(weights):
        weights[GATE] = weights[GATE][:-1].clone()

    edit_weights(broken, change)
    message = reject(WeightError, broken, options)
    assert GATE in message and "[63, 32]" in message and "[64, 32]" in message


def test_the_error_for_a_missing_weight_names_it(broken, options):
    edit_weights(broken, lambda weights: weights.pop(GATE))
    assert GATE in reject(WeightError, broken, options)


def test_the_error_for_an_unexpected_weight_names_it(broken, options):
    edit_weights(broken, lambda weights: weights.update(extra=torch.zeros(2)))
    assert "extra" in reject(WeightError, broken, options)


# --- sizes ------------------------------------------------------------------------------------


def test_a_cache_of_less_than_two_blocks_is_an_error(model_dir, options):
    message = reject(CapacityError, model_dir, options, kv_cache_memory_bytes=100)
    assert "two blocks of 4 tokens" in message


def test_a_max_model_len_that_does_not_fit_the_cache_is_an_error(model_dir, options):
    message = reject(
        CapacityError, model_dir, options, kv_cache_memory_bytes=40_000, max_model_len=256
    )
    assert "max_model_len=256" in message and "lower max_model_len to" in message


def test_a_max_model_len_above_the_limit_of_the_model_is_an_error(model_dir, options):
    assert "256" in reject(ConfigError, model_dir, options, max_model_len=257)


def test_an_engine_starts_after_a_failed_start(model_dir, options):
    reject(PluginNotFoundError, model_dir, options, ops="nothing")
    with LLM(model_dir, **options) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=1))[0].outputs[0].token_ids
