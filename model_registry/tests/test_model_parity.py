"""Compares each architecture with transformers: same random weights, float32, logits within 1e-4.

The reference uses transformers' eager attention, and the model under test uses a dense attention
context. So these tests cover models, layers and the loader, but no attention backend.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from dovetail.interfaces.attention import RotaryArgs
from dovetail.interfaces.model import ModelContext
from dovetail.interfaces.weight_loader import WeightLoaderContext
from dovetail_models.families.llama import LlamaForCausalLM
from dovetail_models.families.mistral import MistralForCausalLM
from dovetail_models.families.qwen2 import Qwen2ForCausalLM
from dovetail_models.families.qwen3 import Qwen3ForCausalLM
from dovetail_torch.layers import TorchLinearMethod, TorchOps, attention_layers
from dovetail_torch.weights import SafetensorsLoader, pack_linears

TOLERANCE = 1e-4
VOCAB_SIZE = 97
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
NULLS = {"beta_fast": None, "beta_slow": 0, "attention_factor": None, "mscale": None}
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = (LlamaForCausalLM, transformers.LlamaForCausalLM, transformers.LlamaConfig)
MISTRAL = (MistralForCausalLM, transformers.MistralForCausalLM, transformers.MistralConfig)
QWEN2 = (Qwen2ForCausalLM, transformers.Qwen2ForCausalLM, transformers.Qwen2Config)
QWEN3 = (Qwen3ForCausalLM, transformers.Qwen3ForCausalLM, transformers.Qwen3Config)
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
CASES = {
    "llama": (LLAMA, {}),
    "llama_tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama_biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama_head_20": (LLAMA, {"head_dim": 20, "num_key_value_heads": 1}),
    "llama_head_36_all_heads": (LLAMA, {"head_dim": 36, "num_key_value_heads": 4}),
    "llama3_rope": (LLAMA, {"rope_parameters": LLAMA3_ROPE}),
    "llama_yarn": (LLAMA, {"rope_parameters": YARN_ROPE}),
    "llama_swish": (LLAMA, {"hidden_act": "swish"}),
    "llama_linear": (LLAMA, {"rope_parameters": LINEAR_ROPE}),
    "llama_partial_ignored": (LLAMA, {"partial_rotary_factor": 0.5}),
    "mistral_partial_ignored": (MISTRAL, {"partial_rotary_factor": 0.25}),
    "qwen2_partial_ignored": (
        QWEN2,
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "qwen3_partial_ignored": (QWEN3, {"partial_rotary_factor": 0.5, "head_dim": 20}),
    "llama_whole_heads_linear": (
        LLAMA,
        {"rope_parameters": LINEAR_ROPE, "partial_rotary_factor": 1.0},
    ),
    "yarn_factor_null": (LLAMA, {"rope_parameters": YARN_ROPE | {"factor": None} | NULLS}),
    "yarn_no_truncation": (LLAMA, {"rope_parameters": YARN_ROPE | {"truncate": None}}),
    "yarn_no_original": (
        QWEN2,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "yarn_mscale": (
        QWEN3,
        {"rope_parameters": YARN_ROPE | {"mscale": 1.5, "mscale_all_dim": 0.7}, "head_dim": 20},
    ),
    "llama3_no_ramp": (
        LLAMA,
        {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4.0, "high_freq_factor": 2.0}},
    ),
    "llama3_equal_factors": (
        LLAMA,
        {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 2.0, "high_freq_factor": 2.0}},
    ),
    "mistral_window": (MISTRAL, {"sliding_window": 9}),
    "mistral_full": (MISTRAL, {"sliding_window": None, "head_dim": 20}),
    "qwen2": (QWEN2, {"tie_word_embeddings": True}),
    "qwen2_window_above": (QWEN2, WINDOWED),
    "qwen2_window_unused": (QWEN2, {"sliding_window": 7, "use_sliding_window": False}),
    "qwen3": (QWEN3, {"head_dim": 36, "tie_word_embeddings": True}),
    "qwen3_biases_window": (QWEN3, {"head_dim": 20, "attention_bias": True} | WINDOWED),
}


class DenseAttention:
    """Causal attention over the tokens of one prompt."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [layer for _, layer in attention_layers(model)]
        self.calls: list[int] = []

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        self.calls.append(index)
        if rotary_args is not None:
            q_THD, k_TKD = rotary_args.apply(q_THD, k_TKD)
        layer = self.layers[index]
        num_tokens, num_heads, _ = q_THD.shape
        group = num_heads // k_TKD.shape[1]
        k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_TKD, v_TKD))
        distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
        hidden = distance < 0
        if layer.sliding_window:
            hidden = hidden | (distance >= layer.sliding_window)
        scores = torch.einsum("thd,shd->hts", q_THD, k_THD) * layer.scale
        if layer.soft_cap:
            scores = (scores / layer.soft_cap).tanh() * layer.soft_cap
        if layer.alibi_slopes:
            scores = scores - torch.tensor(layer.alibi_slopes)[:, None, None] * distance
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, v_THD)

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD


def make_context(hf_config: dict, **changes: object) -> ModelContext:
    fields: dict = {
        "hf_config": hf_config,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "linear_method": TorchLinearMethod(),
        "ops": TorchOps(),
        "max_model_len": 128,
    }
    return ModelContext(**(fields | changes))


def save_reference(classes: tuple, changes: dict, folder: Path) -> nn.Module:
    """Save a model with large random weights: a wrong mask or angle then changes the logits."""
    _, reference_cls, config_cls = classes
    torch.manual_seed(20)
    config = config_cls(**(SMALL | changes), attn_implementation="eager")
    reference = reference_cls(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.2 if parameter.ndim == 2 else parameter + 0.3 * noise)
    reference.save_pretrained(folder)
    return reference


def load_ours(model_cls: type, folder: Path) -> nn.Module:
    hf_config = json.loads((folder / "config.json").read_text())
    model = model_cls(make_context(hf_config))
    SafetensorsLoader(WeightLoaderContext(model_dir=folder)).load(model)
    pack_linears(model)
    return model


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    classes, changes = CASES[case]
    reference = save_reference(classes, changes, tmp_path)
    model = load_ours(classes[0], tmp_path)
    for num_tokens in (1, 2, 17, 100):
        ids = torch.randint(0, VOCAB_SIZE, (num_tokens,))
        attention = DenseAttention(model)
        logits = model.compute_logits(model(ids, torch.arange(num_tokens), attention))
        expected = reference(ids[None]).logits[0]
        assert attention.calls == [0, 1]
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def test_a_sliding_window_changes_the_logits(tmp_path: Path) -> None:
    save_reference(MISTRAL, {"sliding_window": 9}, tmp_path)
    model = load_ours(MistralForCausalLM, tmp_path)
    ids, positions = torch.randint(0, VOCAB_SIZE, (40,)), torch.arange(40)
    windowed = model(ids, positions, DenseAttention(model))
    for _, layer in attention_layers(model):
        layer.sliding_window = 0
    full = model(ids, positions, DenseAttention(model))
    assert (windowed - full).abs().max() > 100 * TOLERANCE


@torch.inference_mode()
def test_the_old_and_the_new_config_format_define_the_same_model(tmp_path: Path) -> None:
    save_reference(LLAMA, {"rope_parameters": LLAMA3_ROPE}, tmp_path)
    new_form = json.loads((tmp_path / "config.json").read_text())
    old_form = {key: value for key, value in new_form.items() if key != "rope_parameters"}
    scaling = dict(LLAMA3_ROPE)
    old_form |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    tables = [
        LlamaForCausalLM(make_context(config)).model.layers[0].self_attn.rotary.cos_sin_PR
        for config in (new_form, old_form)
    ]
    assert torch.equal(*tables)


@torch.inference_mode()
def test_bfloat16_logits_are_close_to_float32_logits(tmp_path: Path) -> None:
    save_reference(QWEN3, {"head_dim": 20, "tie_word_embeddings": True}, tmp_path)
    exact = load_ours(Qwen3ForCausalLM, tmp_path)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    rounded = Qwen3ForCausalLM(make_context(hf_config, dtype=torch.bfloat16))
    SafetensorsLoader(WeightLoaderContext(model_dir=tmp_path)).load(rounded)
    ids, positions = torch.randint(0, VOCAB_SIZE, (30,)), torch.arange(30)
    first, second = (m(ids, positions, DenseAttention(m)) for m in (exact, rounded))
    assert second.dtype is torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(first, second.float(), dim=-1)
    assert cosine.min() > 0.99


@pytest.mark.costly
@torch.inference_mode()
def test_the_model_compiles_to_a_single_graph(tmp_path: Path) -> None:
    save_reference(QWEN3, {"head_dim": 20}, tmp_path)
    model = load_ours(Qwen3ForCausalLM, tmp_path)
    ids, positions = torch.randint(0, VOCAB_SIZE, (11,)), torch.arange(11)
    attention = DenseAttention(model)
    expected = model(ids, positions, attention)
    # "eager" traces under the same rules as a real compiler, which would take minutes.
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, positions, attention), expected)
