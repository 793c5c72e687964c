"""`quantization="fp8"` gives the same outputs as a checkpoint with the rounded values."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dovetail.errors import ConfigError, WeightError
from end_to_end.quantized_checkpoints import make_plain, outputs

KEPT = ("lm_head", "embed_tokens", "norm", ".mlp.gate.")
EXPERTS = {
    "vocab_size": 320,
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


def rounded(weight, block):
    """Return the codes and the scales: each block, or row if `block` is 0, has its own scale."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    height, width = (block, block) if block else (1, weight.shape[1])
    grid = [-(-size // part) for size, part in zip(weight.shape, (height, width), strict=True)]
    scales = torch.empty(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            place = (
                slice(row * height, (row + 1) * height),
                slice(column * width, (column + 1) * width),
            )
            scales[row, column] = weight[place].float().abs().max() / 448
            codes[place] = (weight[place].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def write_rounded(plain, target, *, block=0, kept=KEPT, dtype=torch.float32):
    """Write the checkpoint with rounded values, and an FP8 checkpoint with their codes."""
    values, stored = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        values[name] = stored[name] = weight
        if weight.ndim != 2 or any(part in name for part in kept):
            continue
        codes, scales = rounded(weight.to(dtype), block)
        stored |= {name: codes, name.replace("weight", "weight_scale"): scales}
        if block:
            stored[name.replace("weight", "weight_scale_inv")] = stored.pop(
                name.replace("weight", "weight_scale")
            )
        rows, columns = (
            torch.arange(size) // part
            for size, part in zip(weight.shape, (block or 1, block or weight.shape[1]), strict=True)
        )
        values[name] = (codes.float() * scales[rows][:, columns]).to(dtype)
    config = json.loads((plain / "config.json").read_text())
    for kind, tensors in (("values", values), ("codes", stored)):
        shutil.copytree(plain, target / kind)
        save_file(tensors, target / kind / "model.safetensors")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "modules_to_not_convert": [part.strip(".") for part in kept],
    } | ({"weight_block_size": [block, block]} if block else {})
    (target / "codes" / "config.json").write_text(json.dumps(config))
    return target / "values", target / "codes"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_plain(tmp_path_factory.mktemp("plain"))


def fp8(model, *, num_ranks=1, dtype="float32", platform="auto", **options):
    settings = {"quantization": "fp8", "dtype": dtype, "tensor_parallel_size": num_ranks}
    return outputs(
        model, **settings, platform=platform, plugin_options={"linear_method:fp8": options}
    )[:2]


@pytest.mark.costly
@pytest.mark.parametrize("block", [0, 32])
def test_the_outputs_equal_those_of_checkpoints_with_the_rounded_values(block, plain, tmp_path):
    values, codes = write_rounded(plain, tmp_path, block=block)
    options = {"scales": "block", "block_size": block} if block else {}
    actual = fp8(plain, **options)
    assert actual == outputs(values)[:2] == outputs(codes)[:2]
    assert actual != outputs(plain)[:2]


def test_bfloat16_weights_are_rounded_and_computed_by_the_default_method(plain, tmp_path):
    values, _ = write_rounded(plain, tmp_path, dtype=torch.bfloat16)
    assert fp8(plain, dtype="bfloat16") == outputs(values, dtype="bfloat16")[:2]


@pytest.mark.costly
def test_two_ranks_compute_the_same_values_as_one_rank(plain, tmp_path):
    values, _ = write_rounded(plain, tmp_path)
    assert fp8(plain, num_ranks=2) == outputs(values, tensor_parallel_size=2)[:2]


@pytest.mark.costly
def test_ignored_layers_and_the_head_option_affect_only_the_layers_that_they_name(plain, tmp_path):
    kept = (*KEPT, "down_proj", "self_attn")
    values, _ = write_rounded(plain, tmp_path / "ignored", kept=kept)
    assert fp8(plain, ignored_layers=["down_proj", "self_attn"]) == outputs(values)[:2]
    values, _ = write_rounded(plain, tmp_path / "head", kept=("embed_tokens", "norm"))
    assert fp8(plain, head="fp8") == outputs(values)[:2]


def test_experts_are_rounded_and_the_router_is_not(tmp_path):
    torch.manual_seed(1)
    folder = tmp_path / "experts"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)).save_pretrained(folder)
    values, _ = write_rounded(folder, tmp_path, dtype=torch.bfloat16)
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    expected = outputs(values, **options)[:2]
    assert outputs(folder, quantization="fp8", **options)[:2] == expected


REJECTED = {
    "unknown layer": ({"ignored_layers": ["mlp.up"]}, "'mlp.up' names no linear layer"),
    "part": ({"ignored_layers": ["up_proj"]}, r"up_proj but not .*gate_proj.*name all parts of"),
    "scales": ({"scales": "tensor"}, "scales"),
    "block size": ({"block_size": 0}, "block_size"),
    "names": ({"ignored_layers": ["x" * 301]}, "ignored_layers"),
    "option": ({"bits": 8}, "bits"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_an_invalid_option_is_rejected(name, plain):
    options, match = REJECTED[name]
    with pytest.raises(ConfigError, match=match):
        fp8(plain, **options)


@pytest.mark.costly
def test_quantization_blocks_that_span_two_ranks_are_rejected(plain):
    with pytest.raises(ConfigError, match=r"cut a block of 128.*scales='channel'"):
        fp8(plain, num_ranks=2, scales="block")


def test_weights_with_nan_are_rejected(plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError, match="up_proj"):
        fp8(folder, dtype="bfloat16")


def test_a_notice_states_that_fp8_saves_no_memory(plain, caplog):
    with caplog.at_level(logging.INFO, "dovetail_torch"):
        fp8(plain)
    assert "quantization='fp8'" in caplog.text and "as much memory as" in caplog.text
