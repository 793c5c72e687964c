"""`dovetail quantize` for models with experts: tokens, reports, and models that are rejected."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dovetail import SamplingParams
from dovetail.config.model_directory import ModelDirectory
from dovetail.errors import ConfigError, ModelError
from dovetail_gguf.reader import GGUFFile
from dovetail_quantize import run as run_module
from dovetail_quantize.opened_model import open_model
from dovetail_quantize.quantize_command import quantize as command
from dovetail_quantize.quantize_options import QuantizeOptions
from dovetail_quantize.texts import built_in_text

demo = pytest.importorskip("dovetail_demo_model")
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
INNER = {"moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 5}
MODELS = {
    "qwen3moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**INNER, "head_dim": 16, "norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen2moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {**INNER, "shared_expert_intermediate_size": 64},
    ),
    "llama": (MixtralForCausalLM, MixtralConfig, {"intermediate_size": 32, "num_local_experts": 4}),
}
PROMPTS = [[5, 9, 2, 7], [33, 12, 80]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def make(folder, name, **changes):
    """Write a small random model with the tokenizer of the demo model."""
    source = Path(demo.model_dir())
    model_cls, config_cls, fields = MODELS[name]
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    torch.manual_seed(4)
    config = config_cls(vocab_size=vocab_size, **{**SIZES, **fields, **changes})
    model = model_cls(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            elif path.endswith("bias"):
                parameter.normal_()
        if config.num_experts_per_tok == 1:
            for layer in model.model.layers:  # the last expert never has the highest score
                layer.mlp.gate.weight[-1] = layer.mlp.gate.weight[:-1].mean(0)
    model.bfloat16().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)
    return folder


def tokens(opened):
    outputs = opened.llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(built_in_text()[:1800], "utf-8")
    return path


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "method"), [("qwen3moe", "gptq"), ("qwen2moe", "rtn"), ("llama", "gptq")]
)
def test_a_saved_model_with_experts_generates_the_same_tokens_as_before(
    name, method, tmp_path, text, monkeypatch, capsys
):
    before = []
    quantize_layers = run_module.quantize_layers

    def quantize(opened, *arguments):
        result = quantize_layers(opened, *arguments)
        before.append(tokens(opened))
        return result

    monkeypatch.setattr(run_module, "quantize_layers", quantize)
    model, out = make(tmp_path / "model", name), tmp_path / "out"
    options = QuantizeOptions(
        method=method,
        format="int4",
        calibrate=text,
        evaluate=text,
        out=out,
        report=True,
        head="bfloat16",
        max_layer_error=1.0,
    )
    command(str(model), options=options)
    with open_model(str(out / "model.gguf"), linear_method="torch") as opened:
        assert tokens(opened) == before[0]
    file = GGUFFile(out / "model.gguf")
    assert file.metadata["general.architecture"] == name
    types = {own: info.type.name for own, info in file.tensors.items() if own.startswith("blk.1.")}
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"
    for part in ("gate", "up", "down"):
        assert types[f"blk.1.ffn_{part}_exps.weight"] == "Q4_0"
    printed = capsys.readouterr().out
    assert "layers.1.mlp.experts.up_proj" in printed


@pytest.mark.costly
def test_experts_without_tokens_are_reported_and_rounded_to_nearest(tmp_path, text, capsys):
    model, out = make(tmp_path / "model", "qwen3moe", num_experts_per_tok=1), tmp_path / "out"
    command(
        str(model),
        options=QuantizeOptions(method="gptq", calibrate=text, out=out, max_layer_error=1.0),
    )
    printed = capsys.readouterr().out
    assert "experts received no tokens of the calibration text" in printed
    for number in range(2):
        (unused,) = re.findall(rf"layers\.{number}\.mlp\.experts: ([\d, ]+)", printed)
        assert "4" in unused.split(", ")


@pytest.mark.costly
def test_experts_above_the_error_limit_are_kept_at_8_bits(tmp_path, text, capsys):
    model, out = make(tmp_path / "model", "qwen3moe"), tmp_path / "out"
    command(
        str(model),
        options=QuantizeOptions(
            format="int4", calibrate=text, out=out, max_layer_error=0.0, head="bfloat16"
        ),
    )
    assert "layers are kept at 8 bits" in capsys.readouterr().out
    tensors = GGUFFile(out / "model.gguf").tensors
    assert {info.type.name for name, info in tensors.items() if "_exps" in name} == {"Q8_0"}


def test_awq_with_experts_and_models_with_some_dense_layers_are_rejected(tmp_path, text):
    model = make(tmp_path / "model", "qwen3moe")
    with pytest.raises(ConfigError, match=r"--method=awq does not support models with experts"):
        command(str(model), options=QuantizeOptions(method="awq", calibrate=text))
    mixed = make(tmp_path / "mixed", "qwen3moe", mlp_only_layers=[0])
    assert ModelDirectory.open(str(mixed)).config["mlp_only_layers"]
    with pytest.raises(ModelError, match="mlp_only_layers"):
        command(str(mixed), options=QuantizeOptions(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
