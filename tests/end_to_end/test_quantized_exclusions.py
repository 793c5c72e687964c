"""Checkpoints whose quantized modules contradict `quantization_config` are rejected."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.errors import WeightError
from dovetail_quantized_checkpoints.exclusions import Exclusions, check_modules
from dovetail_torch.weights.checkpoint_files import WeightEntry
from end_to_end.checkpoints import make_checkpoint
from end_to_end.quantized_checkpoints import outputs
from end_to_end.quantized_writers import awq, fp8_blocks, gptq, packed_integers, write

UP = "model.layers.1.mlp.up_proj"
METHODS = {
    "awq": (awq(), {"modules_to_not_convert": [UP]}, ("qweight", "qzeros", "scales")),
    "compressed-tensors": (
        packed_integers(),
        {"ignore": ["lm_head", UP]},
        ("weight_packed", "weight_scale", "weight_shape"),
    ),
    "compressed-tensors, pattern": (
        packed_integers(),
        {"ignore": ["lm_head", r"re:.*layers\.1\.mlp\.up_proj$"]},
        ("weight_packed", "weight_scale", "weight_shape"),
    ),
    "fp8": (
        fp8_blocks(),
        {"modules_to_not_convert": ["layers.1.mlp.up_proj"]},
        ("weight", "weight_scale_inv"),
    ),
    "gptq": (
        gptq(),
        {"dynamic": {r"-:model\.layers\.1\.mlp\.up_proj": {}}},
        ("qweight", "qzeros", "scales", "g_idx"),
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return make_checkpoint(folder, hidden_size=64, intermediate_size=96, num_hidden_layers=2)


def changed(folder, config, leaves, *, stores_plain):
    """Change quantization_config, and store `UP` without quantization if `stores_plain`."""
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields["quantization_config"] |= config
    file.write_text(json.dumps(fields))
    if stores_plain:
        tensors = load_file(folder / "model.safetensors")
        for leaf in leaves:
            del tensors[f"{UP}.{leaf}"]
        tensors[f"{UP}.weight"] = torch.ones(96, 64)
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.costly
@pytest.mark.parametrize("method", METHODS)
def test_modules_must_be_quantized_as_the_configuration_states(method, plain, tmp_path):
    written, excluding, leaves = METHODS[method]
    field = next(iter(excluding))
    cases = {
        name: write(plain, tmp_path / name, written)[0] for name in ("excluded", "partly", "both")
    }
    changed(cases["excluded"], excluding, leaves, stores_plain=False)
    with pytest.raises(WeightError, match=rf"{UP}.* is quantized, but .*\.{field} excludes"):
        outputs(cases["excluded"])
    changed(cases["partly"], {}, leaves, stores_plain=True)
    with pytest.raises(WeightError, match=rf"{UP}.weight is not quantized, but .*\.{field}"):
        outputs(cases["partly"])
    changed(cases["both"], excluding, leaves, stores_plain=True)
    assert outputs(cases["both"])[0]


def test_a_configuration_without_quantized_weights_is_rejected(plain, tmp_path):
    quantized, values = write(plain, tmp_path, gptq())
    (values / "config.json").write_text((quantized / "config.json").read_text())
    with pytest.raises(WeightError, match=r"no name ends with \.qweight"):
        outputs(values)


@pytest.mark.parametrize("value", [7, "lm_head", [None], {"lm_head": {}, 3: {}}])
def test_an_invalid_list_of_excluded_modules_is_rejected(value):
    with pytest.raises(WeightError, match=r"modules_to_not_convert is .* module names"):
        Exclusions("awq", {"modules_to_not_convert": value})


@pytest.mark.parametrize(
    ("method", "field", "entry", "module", "excludes"),
    [
        ("awq", "modules_to_not_convert", "gate", "model.layers.0.mlp.gate", True),
        ("awq", "modules_to_not_convert", "gate", "model.layers.0.mlp.gate_proj", False),
        ("compressed-tensors", "ignore", "re:.*mlp.gate$", "model.layers.3.mlp.gate", True),
        ("compressed-tensors", "ignore", "re:.*mlp.gate$", "model.layers.3.mlp.gate_proj", False),
        (
            "compressed-tensors",
            "ignore",
            "model.layers.3.mlp",
            "language_model.model.layers.3.mlp",
            True,
        ),
        ("gptq", "dynamic", r"-:.*\.up_proj", "model.layers.3.mlp.up_proj", True),
        ("gptq", "dynamic", r"+:.*\.up_proj", "model.layers.3.mlp.up_proj", False),
    ],
)
def test_exclusion_entries_have_the_meaning_that_their_tools_define(
    method, field, entry, module, excludes
):
    exclusions = Exclusions(method, {field: [entry]})
    assert (exclusions.entry_for(module) is not None) is excludes
    assert exclusions.may_exclude(module) is excludes


@pytest.mark.costly
def test_hostile_patterns_and_many_modules_are_checked_in_bounded_time():
    patterns = ["re:(a+)+$", "re:" + "a?" * 400, "re:.*.*.*.*b", "re:[", *["re:.*b.*c"] * 1000]
    exclusions = Exclusions("compressed-tensors", {"ignore": patterns})
    entries = {
        f"layers.{number}.{'a' * 200}": WeightEntry(
            name="w", path=Path("file"), shape=(1, 1), dtype="I32"
        )
        for number in range(20_000)
    }
    begun = time.process_time()
    check_modules(exclusions, entries, (), are_all=True)
    assert exclusions.may_exclude("layers.1.b"), "an unknown pattern may match"
    assert time.process_time() - begun < 10
