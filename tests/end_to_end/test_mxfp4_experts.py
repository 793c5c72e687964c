"""The MXFP4 experts of gpt-oss: values, outputs, and checkpoints that are rejected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dovetail.errors import WeightError
from dovetail_quantized_checkpoints.formats.base import ModuleTensors
from dovetail_quantized_checkpoints.formats.mxfp4 import MXFP4
from dovetail_torch.weights.checkpoint_files import WeightEntry
from end_to_end.quantized_checkpoints import outputs

OPTIONS = {"skip_tokenizer_init": True}
EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")
FIRST = "model.layers.0.mlp.experts.gate_up_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("plain")
    config = GptOssConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    GptOssForCausalLM(config).save_pretrained(folder)
    return folder


def pack(values: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks and scales of a weight [E, I, O]. Values are below 1."""
    num_experts, num_inputs, num_outputs = values.shape
    grid = (num_experts, num_outputs, num_inputs // 32)
    blocks = torch.randint(0, 256, (*grid, 16), generator=generator)
    scales = torch.randint(120, 125, grid, generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def write(plain: Path, folder: Path, change: Callable[[Tensors], None], **fields: object) -> Path:
    """Write a quantized checkpoint; `change` edits its tensors. Return its directory."""
    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if EXPERTS.fullmatch(name):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pack(weight, generator)
        else:
            tensors[name] = weight
    change(tensors)
    quantized = folder / "quantized"
    quantized.mkdir()
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", **fields}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized


def test_mxfp4_experts_give_the_same_outputs_as_dequantized_weights(
    plain: Path, tmp_path: Path
) -> None:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    quantized = write(plain, tmp_path, lambda _: None, modules_to_not_convert=kept)
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        weight = name.removesuffix("_blocks")
        scales = tensors.pop(f"{weight}_scales")
        values = convert_moe_packed_tensors(tensors.pop(name), scales, dtype=torch.float32)
        tensors[weight] = values.contiguous()
    expected_folder = tmp_path / "values"
    expected_folder.mkdir()
    save_file(tensors, expected_folder / "model.safetensors", metadata={"format": "pt"})
    (expected_folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    tokens, rows, loader = outputs(quantized, **OPTIONS)
    assert "quantized_safetensors" in str(loader)
    expected = outputs(expected_folder, **OPTIONS)
    assert (tokens, rows) == expected[:2]
    assert tokens != outputs(plain, **OPTIONS)[0]


def test_dequantized_values_are_bitwise_equal_to_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 250, (3, 10, 2), generator=generator).to(torch.uint8)
    tensors = {"x_blocks": blocks, "x_scales": scales}
    entries = {
        name.removeprefix("x"): WeightEntry(
            name=name, path=Path("file"), shape=tuple(tensor.shape), dtype="U8"
        )
        for name, tensor in tensors.items()
    }
    stored = MXFP4({}).open(ModuleTensors(prefix="x", entries=entries), tensors.__getitem__)
    expected = convert_moe_packed_tensors(blocks, scales)
    assert stored.shape == expected.shape == (3, 64, 10)
    for expert, values in enumerate(expected):
        assert torch.equal(stored.values_of(expert).bfloat16(), values)


def remove(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def replace(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


BROKEN: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "no scales": (remove(f"{FIRST}_scales"), f"{FIRST}_scales is missing"),
    "no blocks": (remove(f"{FIRST}_blocks"), f"{FIRST}_blocks is missing"),
    "scales of a different shape": (
        replace(f"{FIRST}_scales", lambda scales: scales[:, :, :1]),
        f"{FIRST}_scales has the shape [4, 192, 1]",
    ),
    "scales as floats": (
        replace(f"{FIRST}_scales", lambda scales: scales.float()),
        f"{FIRST}_scales has the dtype F32",
    ),
    "blocks of a different size": (
        replace(f"{FIRST}_blocks", lambda blocks: blocks[..., :8]),
        f"{FIRST}_blocks has the shape [4, 192, 2, 8]",
    ),
    "fewer experts": (
        lambda tensors: tensors.update(
            {f"{FIRST}_{part}": tensors[f"{FIRST}_{part}"][:3] for part in ("blocks", "scales")}
        ),
        f"{FIRST} has the shape [3, 64, 192], but config.json requires [4, 64, 192]",
    ),
    "an exponent without a value": (
        replace(f"{FIRST}_scales", lambda scales: scales.fill_(255)),
        "NaN or infinite",
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", BROKEN)
def test_the_error_for_a_damaged_checkpoint_names_the_tensor(
    name: str, plain: Path, tmp_path: Path
) -> None:
    change, message = BROKEN[name]
    options = OPTIONS | ({"dtype": "bfloat16"} if "exponent" in name else {})
    with pytest.raises(WeightError, match=re.escape(message)):
        outputs(write(plain, tmp_path, change), **options)


def test_experts_that_the_configuration_excludes_are_rejected(plain: Path, tmp_path: Path) -> None:
    quantized = write(plain, tmp_path, lambda _: None, modules_to_not_convert=["mlp.experts"])
    with pytest.raises(WeightError, match=r"_proj_blocks is quantized.*excludes the module"):
        outputs(quantized, **OPTIONS)
