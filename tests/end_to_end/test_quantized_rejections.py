"""Quantized checkpoints that are damaged, or that contradict their configuration, are rejected."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.errors import ModelError, WeightError
from dovetail_torch.weights import Assignment
from end_to_end.quantized_checkpoints import FORMAT_CLASSES, make_plain, opened, outputs
from end_to_end.quantized_writers import (
    fp8_blocks,
    gptq,
    packed_integers,
    rows_of_floats,
    rows_of_integers,
    write,
)

LAYER = "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_plain(tmp_path_factory.mktemp("plain"))


def rejected(folder, change, match):
    """Change the tensors of a quantized checkpoint, and expect an error."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError, match=match):
        outputs(folder)


DAMAGED = {
    "missing scales": (lambda t: t.pop(f"{LAYER}scales"), "q_proj.scales is missing"),
    "missing zeros": (lambda t: t.pop(f"{LAYER}qzeros"), "q_proj.qzeros is missing"),
    "short zeros": (
        lambda t: t.update({f"{LAYER}qzeros": t[f"{LAYER}qzeros"][:, :-1]}),
        r"qzeros has the shape \[2, 7\]",
    ),
    "other groups": (
        lambda t: t.update({f"{LAYER}scales": t[f"{LAYER}scales"].repeat(3, 1)[:5]}),
        "scales has 5 groups for 64 features, but quantization_config states the group_size 32",
    ),
    "wrong dtype": (
        lambda t: t.update({f"{LAYER}qweight": t[f"{LAYER}qweight"].float()}),
        "qweight has the dtype F32",
    ),
    "unknown group": (
        lambda t: t.update({f"{LAYER}g_idx": t[f"{LAYER}g_idx"] * 50}),
        "g_idx names a group",
    ),
    "other group size": (
        lambda t: t.update(
            {f"{LAYER}{n}": t[f"{LAYER}{n}"][:1].clone() for n in ("scales", "qzeros")}
        ),
        "scales has 1 groups for 64 features, but quantization_config states the group_size 32",
    ),
    "another bias": (lambda t: t.update({f"{LAYER}bias": torch.ones(64)}), "q_proj.bias"),
    "another shape": (
        lambda t: t.update({f"{LAYER}{n}": t[f"{LAYER}{n}"][:, :4] for n in ("qweight", "qzeros")}),
        "q_proj",
    ),
    "half quantized": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith(LAYER)],
        "missing",
    ),
    "infinite scale": (
        lambda t: t[f"{LAYER}scales"].fill_(float("inf")),
        "q_proj.weight|NaN or inf",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.sampled(4)
def test_the_error_for_a_damaged_checkpoint_names_the_tensor(name, plain, tmp_path):
    quantized, _ = write(plain, tmp_path, gptq(act_order=True))
    rejected(quantized, *DAMAGED[name])


DAMAGED_INTEGERS = {
    "bits": (
        lambda t: t.update({f"{LAYER}weight_packed": t[f"{LAYER}weight_packed"].repeat(1, 2)}),
        "codes of 8 bits, but quantization_config states 4",
    ),
    "groups": (
        lambda t: t.update({f"{LAYER}weight_scale": t[f"{LAYER}weight_scale"][:, :1].clone()}),
        r"weight_scale has the shape \[64, 1\].*states \[\(64, 2\)\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_INTEGERS)
def test_packed_integers_that_contradict_the_configuration_are_rejected(name, plain, tmp_path):
    quantized, _ = write(plain, tmp_path, packed_integers())
    rejected(quantized, *DAMAGED_INTEGERS[name])


def test_zero_points_of_a_different_shape_are_rejected(plain, tmp_path):
    quantized, _ = write(plain, tmp_path, rows_of_integers())
    name = f"{LAYER}weight_zero_point"
    rejected(
        quantized,
        lambda t: t.update({name: torch.zeros(7, dtype=torch.int8)}),
        r"weight_zero_point has the shape \[7\]",
    )


def test_a_damaged_last_layer_is_found_before_a_weight_is_written(plain, tmp_path, monkeypatch):
    quantized, _ = write(plain, tmp_path, gptq(act_order=True))
    monkeypatch.setattr(Assignment, "fill", lambda *_, **__: pytest.fail("a weight was written"))
    last = "model.layers.0.mlp.down_proj.g_idx"
    rejected(quantized, lambda t: t.update({last: t[last] * 50}), "g_idx names a group")


@pytest.mark.costly
def test_zero_biases_and_unset_group_indices_that_tools_write_are_accepted(plain, tmp_path):
    for folder, written, leaf, tensor in (
        ("bias", gptq(), "bias", torch.zeros(64, dtype=torch.float16)),
        ("order", packed_integers(), "weight_g_idx", torch.full((64,), -1, dtype=torch.int32)),
    ):
        quantized, values = write(plain, tmp_path / folder, written)
        tensors = load_file(quantized / "model.safetensors") | {f"{LAYER}{leaf}": tensor}
        save_file(tensors, quantized / "model.safetensors")
        assert outputs(quantized)[:2] == outputs(values)[:2]


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        (packed_integers(), "sparsity_config", {"format": "dense"}),
        (rows_of_floats(), "transform_config", {}),
    ],
)
def test_fields_without_an_effect_are_accepted(written, field, value):
    config = written.config | {field: value}
    FORMAT_CLASSES["compressed-tensors"](config)
    FORMAT_CLASSES["fp8"]({"fmt": "float8_e4m3fn"})


@pytest.mark.parametrize(
    ("shape", "block"), [((64, 320), [1, 128]), ((64, 6), [1, 4]), ((64, 64), [32, 32])]
)
def test_integers_with_per_block_scales_are_rejected(shape, block):
    weights = {"num_bits": 8, "strategy": "block", "block_structure": block}
    written = replace(
        rows_of_integers(),
        config={"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}},
    )
    grid = [-(-size // part) for size, part in zip(shape, block, strict=True)]
    tensors = {
        "weight": torch.zeros(shape, dtype=torch.int8),
        "weight_scale": torch.ones(grid, dtype=torch.bfloat16),
    }
    with pytest.raises(WeightError, match="weight_scale has"):
        opened(written, tensors)


UNSUPPORTED = {
    "bits": ({"quant_method": "gptq", "bits": 5}, "bits is 5; supported: 2, 3, 4, 8"),
    "boolean bits": ({"quant_method": "gptq", "bits": True}, "bits is True"),
    "format": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format"),
    "contradiction": ({"quant_method": "gptq", "bits": 8}, "codes of 4 bits.*states 8"),
    "awq version": ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
    "sparsity": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
        "sparsity_config",
    ),
    "compressed format": (
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        "format is 'marlin-24'",
    ),
    "groups": ({"quant_method": "compressed-tensors", "config_groups": {"a": 7}}, "config_groups"),
    "group size": (
        {"quant_method": "gptq", "group_size": 0},
        "group_size is 0; it must be a positive integer or -1",
    ),
    "strategy": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"strategy": "row"}}},
        },
        "strategy is 'row'; supported",
    ),
    "block structure": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"strategy": "block", "block_structure": "8x"}}},
        },
        "block_structure is '8x'",
    ),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.sampled(4)
def test_the_error_for_an_unsupported_configuration_names_the_field(name, plain, tmp_path):
    config, match = UNSUPPORTED[name]
    quantized, _ = write(plain, tmp_path, gptq())
    file = quantized / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    with pytest.raises(WeightError, match=match):
        outputs(quantized)


def test_a_method_that_no_plugin_reads_is_rejected(plain, tmp_path):
    quantized, _ = write(plain, tmp_path, gptq())
    file = quantized / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "quip"}}
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'quip'.*Installed methods and loaders"):
        outputs(quantized)


@pytest.mark.parametrize(
    "written", [gptq(), packed_integers(), fp8_blocks()], ids=["gptq", "packed", "fp8"]
)
def test_the_error_for_quantized_weights_without_quantization_config_names_the_field(
    written, plain, tmp_path
):
    quantized, _ = write(plain, tmp_path, written)
    shutil.copy(plain / "config.json", quantized)
    with pytest.raises(WeightError, match=r"needs quantization_config in config\.json; it is"):
        outputs(quantized)
