"""Quantized checkpoints give the same tokens as unquantized checkpoints with the same values."""

from __future__ import annotations

import logging

import gguf
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from dovetail_torch.layers import BlockWeight
from dovetail_torch.weights import Assignment
from end_to_end.quantized_checkpoints import GREEDY, make_plain, opened, outputs
from end_to_end.quantized_writers import (
    FORMATS,
    awq,
    bitsandbytes_blocks,
    bitsandbytes_rows,
    gptq,
    packed_integers,
    rows_of_floats,
    rows_of_integers,
    write,
)

native_library = pytest.importorskip("dovetail_cpu.native_library")

LAYER = "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.costly
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(12)
def test_a_quantized_checkpoint_gives_the_same_outputs_as_dequantized_weights(
    name, plain, tmp_path
):
    quantized, values = write(plain, tmp_path, FORMATS[name])
    tokens, rows, loader = outputs(quantized)
    expected, expected_rows, _ = outputs(values)
    assert "quantized_safetensors" in str(loader)
    assert (tokens, rows) == (expected, expected_rows)


@pytest.mark.costly
def test_two_ranks_give_the_same_outputs_as_dequantized_weights(plain, tmp_path):
    quantized, values = write(plain, tmp_path, gptq(act_order=True))
    tokens, rows, _ = outputs(quantized, tensor_parallel_size=2)
    expected, expected_rows, _ = outputs(values, tensor_parallel_size=2)
    assert (tokens, rows) == (expected, expected_rows)


NATIVE = {
    "gptq_4_bits": (gptq(symmetric=True), "Q4_0"),
    "gptq_8_bits": (gptq(8, symmetric=True), "Q8_0"),
    "packed_4_bits": (packed_integers(), "Q4_0"),
    "rows_of_integers": (rows_of_integers(), "Q8_0"),
    "gptq_zero_points": (gptq(group_size=-1), "Q5_0"),
    "gptq_2_bits": (gptq(2), "Q4_0"),
    "gptq_3_bits": (gptq(3), "Q4_0"),
    "awq": (awq(), "Q5_0"),
    "packed_zero_points": (packed_integers(symmetric=False), "Q5_0"),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.sampled(4)
def test_native_kernels_compute_with_packed_integers_without_requantization(
    name, plain, tmp_path, monkeypatch
):
    if not native_library.probe_fast().usable:
        pytest.skip("there are no fast native kernels here")
    written, kind = NATIVE[name]
    quantized, values = write(plain, tmp_path, written)
    lent = []
    lend = Assignment.share_blocks
    monkeypatch.setattr(
        Assignment, "share_blocks", lambda self, blocks: (lent.append(blocks), lend(self, blocks))
    )
    _, rows, _ = outputs(quantized, dtype="bfloat16", platform="cpu")
    assert [blocks.type_name for blocks in lent] == [kind] * 7
    monkeypatch.undo()
    _, expected, _ = outputs(values, dtype="bfloat16", quantization="torch")
    # The first position of each prompt has the same input; the activations are rounded.
    for first in (0, GREEDY.max_tokens):
        for token in rows[first].keys() & expected[first].keys():
            assert abs(rows[first][token] - expected[first][token]) < 0.3


def gguf_values(blocks):
    kind = gguf.GGMLQuantizationType[blocks.type_name]
    return torch.from_numpy(gguf.quants.dequantize(blocks.rows_OB.numpy(), kind))


@pytest.mark.parametrize("name", NATIVE)
def test_packed_integers_become_blocks_with_exactly_the_same_values(name):
    written, kind = NATIVE[name]
    tensors, values = written.quantize((64, 192), torch.Generator().manual_seed(2))
    stored = opened(written, tensors)
    assert stored.block_type == kind
    blocks = BlockWeight(type_name=kind, rows_OB=stored.blocks(), is_mapped=False)
    scales_dtype = stored.scales.dtype
    assert torch.equal(gguf_values(blocks).to(scales_dtype), values.to(scales_dtype))


@pytest.mark.parametrize(
    "written",
    [
        gptq(8),
        gptq(act_order=True, symmetric=True),
        gptq(group_size=16),
    ],
    ids=["zero points of 8 bits", "act order", "small groups"],
)
def test_layouts_that_blocks_cannot_represent_are_not_read_as_blocks(written):
    tensors, _ = written.quantize((64, 96), torch.Generator().manual_seed(2))
    assert opened(written, tensors).block_type is None


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_zero_points_of_symmetric_weights_are_not_unpacked(bits, version):
    written = gptq(bits, symmetric=True, version=version)
    tensors, values = written.quantize((64, 96), torch.Generator().manual_seed(2))
    stored = opened(written, tensors)
    assert stored.zeros == 1 << bits - 1
    assert torch.equal(stored.dequantize(torch.float32), values.float())


def test_weights_with_scales_that_float16_cannot_represent_are_not_read_as_blocks():
    written = packed_integers()
    tensors, _ = written.quantize((64, 96), torch.Generator().manual_seed(2))
    assert opened(written, tensors).block_type == "Q4_0"
    tensors["weight_scale"] = tensors["weight_scale"] * 2.0**-16
    assert opened(written, tensors).block_type is None


@pytest.mark.costly
def test_a_second_start_uses_the_packed_blocks(plain, tmp_path):
    if not native_library.probe_fast().usable:
        pytest.skip("there are no fast native kernels here")
    quantized, _ = write(plain, tmp_path, gptq(symmetric=True))
    cache = {"packed_cache": str(tmp_path / "cache"), "packed_cache_min_mib": 0}
    options = {"dtype": "bfloat16", "platform": "cpu", "plugin_options": {"worker:cpu": cache}}
    first = outputs(quantized, **options)
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("*"))
    tensors = load_file(quantized / "model.safetensors")
    assert outputs(quantized, **options) == first
    tensors[f"{LAYER}scales"] *= 2
    save_file(tensors, quantized / "model.safetensors")
    assert outputs(quantized, **options) != first  # a changed file is repacked


def test_a_notice_states_the_number_of_dequantized_weights(plain, tmp_path, caplog):
    quantized, _ = write(plain, tmp_path, rows_of_floats())
    with caplog.at_level(logging.INFO, "dovetail_quantized_checkpoints"):
        outputs(quantized, dtype="bfloat16")
    assert "7 quantized weights were dequantized to bfloat16" in caplog.text


ORACLE = {
    "packed_4_bits": ("pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group"}),
    "packed_4_bits_zeros": (
        "pack-quantized",
        {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False},
    ),
    "packed_8_bits_rows": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "rows_of_integers": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "rows_of_floats": (
        "float-quantized",
        {"num_bits": 8, "strategy": "channel", "type": "float"},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "group_size": 32, "strategy": "group", "type": "float"},
    ),
}


@pytest.mark.parametrize("name", ORACLE)
def test_dequantized_values_equal_those_of_the_compressed_tensors_library(name):
    form, arguments = ORACLE[name]
    tensors, _ = FORMATS[name].quantize((64, 96), torch.Generator().manual_seed(1))
    tensors = {leaf: tensor.contiguous() for leaf, tensor in tensors.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    library = BaseCompressor.get_value_from_registry(form)
    expected = library.decompress(dict(tensors), scheme)["weight"]

    stored = opened(FORMATS[name], tensors)
    assert torch.equal(stored.dequantize(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_dequantized_values_equal_those_of_bitsandbytes(kind, nested, dtype):
    library = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn((66, 50), generator=torch.Generator().manual_seed(3)).to(dtype)
    packed, state = library.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    stored = opened(bitsandbytes_blocks(kind), tensors | {"weight": packed})
    expected = library.dequantize_4bit(packed, state)
    assert torch.equal(stored.dequantize(dtype), expected)


def test_dequantized_rows_equal_those_of_bitsandbytes():
    library = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn((66, 50), generator=torch.Generator().manual_seed(3)).half()
    codes, maxima, _ = library.int8_vectorwise_quant(weight)
    stored = opened(bitsandbytes_rows(), {"weight": codes, "SCB": maxima})
    assert torch.equal(
        stored.dequantize(torch.float32), library.int8_vectorwise_dequant(codes, maxima)
    )
