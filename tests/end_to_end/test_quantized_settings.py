"""The quantization's configuration with overrides decides how weights are decoded and cached."""

from __future__ import annotations

import json

import pytest
import torch

from dovetail.config.checkpoint_quantization import read_quantization
from dovetail.errors import WeightError
from dovetail.interfaces import WeightLoaderContext
from dovetail.interfaces.frozen_mapping import freeze
from dovetail_quantized_checkpoints.loader import QuantizedSafetensorsLoader
from end_to_end.quantized_checkpoints import make_plain, outputs
from end_to_end.quantized_writers import awq, gptq, packed_integers, write

native_library = pytest.importorskip("dovetail_cpu.native_library")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_plain(tmp_path_factory.mktemp("plain"))


def table_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def configure(folder, table):
    """Write `quantization_config`; remove it if `table` is None."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("quantization_config", None)
    file.write_text(json.dumps(config if table is None else {**config, **wrapped(table)}))


def wrapped(table):
    return {"quantization_config": table}


def make_loader(folder, table=None):
    """Return a loader. table: what the engine states; None if the loader must read the files."""
    stated = None if table is None else freeze(read_quantization(folder, wrapped(table)))
    context = WeightLoaderContext(model_dir=folder, progress=False, quantization=stated)
    return QuantizedSafetensorsLoader(context)


def values(loader):
    """Return all dequantized weights by name."""
    with loader.checkpoint_tensors(lambda: None) as tensors:
        return {tensor.name: torch.cat(list(tensor.pieces())) for tensor in tensors}


@pytest.mark.costly
def test_overrides_of_the_quantization_decide_how_weights_are_decoded(plain, tmp_path):
    quantized, _ = write(plain, tmp_path, gptq())
    stored = outputs(quantized)
    table = table_of(quantized) | {"checkpoint_format": "gptq_v2"}
    overridden = outputs(quantized, hf_overrides=wrapped(table))
    configure(quantized, table)
    assert overridden == outputs(quantized) != stored


@pytest.mark.costly
@pytest.mark.parametrize("method", ["auto", "int8"])
def test_the_packed_cache_is_not_used_after_a_change_of_the_quantization(method, plain, tmp_path):
    if not native_library.probe_fast().usable:
        pytest.skip("there are no fast native kernels here")
    quantized, _ = write(plain, tmp_path, gptq())
    cache = {"packed_cache": str(tmp_path / "cache"), "packed_cache_min_mib": 0}
    options = {"dtype": "bfloat16", "platform": "cpu", "quantization": method}
    cached = options | {"plugin_options": {"worker:cpu": cache}}
    first = outputs(quantized, **cached)
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("*"))
    table = table_of(quantized) | {"checkpoint_format": "gptq_v2"}
    overridden = outputs(quantized, **cached, hf_overrides=wrapped(table))
    configure(quantized, table)
    assert overridden == outputs(quantized, **cached) == outputs(quantized, **options) != first


def test_the_fingerprint_covers_the_configuration_of_the_quantization(plain, tmp_path):
    quantized, _ = write(plain, tmp_path, gptq(3))
    table = table_of(quantized)
    tables = [
        table,
        table | {"checkpoint_format": "gptq_v2"},
        table | {"meta": {"quantizer": ["gptqmodel:2.1.0"]}},
        table | {"quant_method": "awq"},
    ]
    found = []
    for changed in tables:
        configure(quantized, changed)
        found.append(make_loader(quantized).fingerprint())
        configure(quantized, table)
        assert make_loader(quantized, changed).fingerprint() == found[-1]
    assert len(set(found)) == len(tables)
    configure(quantized, None)
    for changed, expected in zip(tables, found, strict=True):
        (quantized / "quantize_config.json").write_text(json.dumps(changed))
        assert make_loader(quantized).fingerprint() == expected


def test_a_checkpoint_that_the_user_states_is_not_quantized_has_no_fingerprint(plain, tmp_path):
    quantized, _ = write(plain, tmp_path, gptq())
    context = WeightLoaderContext(model_dir=quantized, quantization={})
    with pytest.raises(WeightError, match="is not quantized with one of"):
        QuantizedSafetensorsLoader(context).fingerprint()


STATED = {
    "gptq": (gptq(), {"group_size": 16}, "states the group_size 16"),
    "awq": (awq(), {"group_size": 16}, "states the group_size 16"),
    "compressed-tensors": (
        packed_integers(),
        {"config_groups": {"a": {"weights": {"num_bits": 8, "group_size": 32}}}},
        "codes of 4 bits, but quantization_config states 8",
    ),
}


@pytest.mark.parametrize("method", STATED)
def test_a_loader_uses_the_stated_configuration_instead_of_the_file(method, plain, tmp_path):
    written, change, match = STATED[method]
    quantized, _ = write(plain, tmp_path, written)
    table = table_of(quantized)
    expected = values(make_loader(quantized))
    with pytest.raises(WeightError, match=match):
        values(make_loader(quantized, table | change))
    configure(quantized, table | change)
    stated = values(make_loader(quantized, table))
    assert all(torch.equal(stated[name], value) for name, value in expected.items())
