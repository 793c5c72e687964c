"""Fields of config.json: errors name the field, and each architecture has its own defaults."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_models.families.llama import LlamaForCausalLM
from dovetail_models.families.mistral import MistralForCausalLM
from dovetail_models.families.qwen2 import Qwen2ForCausalLM
from dovetail_models.families.qwen3 import Qwen3ForCausalLM
from dovetail_torch.layers import TorchLinearMethod, TorchOps, attention_layers

SMALL = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def make_model(model_cls: type, **changes: object) -> nn.Module:
    context = ModelContext(
        hf_config=SMALL | changes,
        dtype=torch.float32,
        device=torch.device("meta"),
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=8,
    )
    return model_cls(context)


def windows_of(model: nn.Module) -> list[int]:
    return [layer.sliding_window for _, layer in attention_layers(model)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "tanh"}, ("hidden_act", "'tanh'", "silu")),
        ({"hidden_size": None}, ("hidden_size", "is absent")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "is 0")),
        ({"vocab_size": "many"}, ("vocab_size", "'many'")),
        ({"num_key_value_heads": 3}, ("num_attention_heads 4", "num_key_value_heads 3")),
        ({"hidden_size": 26}, ("hidden_size 26", "head_dim is absent")),
        ({"hidden_size": 2**20}, ("head size is 262144", "hidden_size 1048576")),
        ({"head_dim": 7}, ("rotary_dim=7", "head_dim")),
        ({"rms_norm_eps": -1}, ("rms_norm_eps", "-1")),
        ({"rms_norm_eps": 1e-300}, ("rms_norm_eps", "from 1e-30 to 1e+30")),
        ({"rms_norm_eps": 1e300}, ("rms_norm_eps", "from 1e-30 to 1e+30")),
        (
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "factor": 2.0}
                | {"long_factor": [1.0] * 3, "original_max_position_embeddings": 1}
            },
            ("'longrope'", "original_max_position_embeddings above 1"),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 1e-29}, "rope_theta": 1e-29},
            ("rope_theta 1e-29", "'linear'", "angles above 1e+28"),
        ),
        ({"attention_bias": "yes"}, ("attention_bias", "'yes'")),
        ({"rope_scaling": {"type": "dynamical", "factor": 2.0}}, ("'dynamical'", "yarn")),
        ({"rope_parameters": {"rope_type": "lama3"}}, ("'lama3'", "Did you mean 'llama3'?")),
        ({"rope_scaling": {"type": "linear"}}, ("'linear' needs factor", "None")),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ("differ between layer types",),
        ),
        ({"rope_scaling": "yarn"}, ("'yarn'", "must be an object")),
        ({"rope_scaling": {"type": "yarn"}}, ("'yarn' needs factor", "None")),
        ({"rope_scaling": {"type": "linear", "factor": None}}, ("'linear' needs factor", "None")),
        ({"rope_scaling": {"type": "linear", "factor": 2**120}}, ("needs factor", "132922")),
        ({"rope_scaling": {"type": ["linear"]}}, ("rope type ['linear']",)),
        ({"rope_theta": "10000"}, ("needs rope_theta", "'10000'")),
        ({"partial_rotary_factor": "half"}, ("partial_rotary_factor", "'half'")),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1}},
            ("mscale", "'1'"),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
            ("partial_rotary_factor is 0.5", "'linear'"),
        ),
    ],
)
def test_config_errors_contain_the_field_and_its_value(
    changes: dict, words: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        make_model(LlamaForCausalLM, **changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "kinds", [["full_attention"], ["chunked_attention"] * 4, [{}] * 4, "sliding_attention"]
)
def test_invalid_layer_types_are_rejected(kinds: object) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        make_model(Qwen2ForCausalLM, layer_types=kinds, use_sliding_window=True)


def test_mistral_has_the_same_window_in_all_layers() -> None:
    assert windows_of(make_model(MistralForCausalLM, sliding_window=5)) == [5] * 4
    assert windows_of(make_model(MistralForCausalLM, sliding_window=None)) == [0] * 4
    assert windows_of(make_model(MistralForCausalLM)) == [4096] * 4


@pytest.mark.parametrize("model_cls", [Qwen2ForCausalLM, Qwen3ForCausalLM])
def test_qwen_has_windows_in_the_configured_layers(model_cls: type) -> None:
    window_config = {"use_sliding_window": True, "sliding_window": 5}
    mixed = ["sliding_attention", "full_attention"] * 2
    assert windows_of(make_model(model_cls, sliding_window=5)) == [0] * 4
    assert windows_of(make_model(model_cls, **window_config)) == [0] * 4
    assert windows_of(make_model(model_cls, **window_config, max_window_layers=0)) == [5] * 4
    assert windows_of(make_model(model_cls, **window_config, max_window_layers=3)) == [0, 0, 0, 5]
    assert windows_of(make_model(model_cls, **window_config, layer_types=mixed)) == [5, 0, 5, 0]


def test_linear_layers_have_the_biases_of_the_architecture() -> None:
    def biases(model: nn.Module) -> set[str]:
        names = (name for name, _ in model.named_parameters() if name.endswith(".bias"))
        return {name.removesuffix(".bias").rpartition(".")[2] for name in names}

    assert biases(make_model(LlamaForCausalLM)) == set()
    assert biases(make_model(LlamaForCausalLM, attention_bias=True)) == {"qkv_proj", "o_proj"}
    assert biases(make_model(LlamaForCausalLM, mlp_bias=True)) == {"gate_up_proj", "down_proj"}
    assert biases(make_model(Qwen2ForCausalLM)) == {"qkv_proj"}
    assert biases(make_model(Qwen3ForCausalLM)) == set()


def test_parameters_are_on_the_device_of_the_context_and_need_no_gradient() -> None:
    for parameter in make_model(Qwen3ForCausalLM).parameters():
        assert parameter.device.type == "meta"
        assert not parameter.requires_grad


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, dovetail_models, dovetail_models.families; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
