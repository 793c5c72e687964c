"""Unpacking, chunked dequantization and field checks. tests/end_to_end tests the loader."""

import pytest
import torch

from dovetail.errors import WeightError
from dovetail_quantized_checkpoints.formats.base import ModuleTensors, choice, group_count
from dovetail_quantized_checkpoints.packing import unpack
from dovetail_quantized_checkpoints.stored_weight import IntegerWeight, ScaledWeight
from dovetail_torch.weights.checkpoint_files import WeightEntry


def pack(codes, bits):
    number = sum(code << index * bits for index, code in enumerate(codes))
    words = [number >> 32 * k & 0xFFFFFFFF for k in range(-(-len(codes) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_are_unpacked_in_order(bits):
    codes = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    words = torch.tensor([pack(row, bits) for row in codes.tolist()], dtype=torch.int32)
    assert torch.equal(unpack(words, bits), codes.to(torch.int16))


def test_the_largest_code_is_unpacked_at_every_position():
    for bits in range(2, 9):
        words = torch.full((1, bits), -1, dtype=torch.int32)
        assert set(unpack(words, bits)[0].tolist()) == {(1 << bits) - 1}


def test_a_weight_that_is_dequantized_in_chunks_has_all_rows(monkeypatch):
    monkeypatch.setattr("dovetail_quantized_checkpoints.stored_weight.MAX_CHUNK_VALUES", 70)
    codes = torch.arange(5 * 32).view(5, 32).to(torch.int16) % 16
    weight = IntegerWeight(
        shape=(5, 32),
        bits=4,
        codes=lambda rows: codes[rows],
        scales=torch.full((5, 1), 0.5),
        zeros=8,
    )
    assert torch.equal(weight.dequantize(torch.float32), (codes - 8) * 0.5)


def test_blocks_of_scales_may_be_larger_than_the_weight():
    numbers = torch.ones(3, 5)
    weight = ScaledWeight(
        shape=(3, 5),
        numbers=lambda rows: numbers[rows],
        scales=torch.tensor([[2.0, 3.0]]),
        block=(4, 4),
    )
    assert torch.equal(weight.values(slice(0, 3)), torch.tensor([[2.0, 2, 2, 2, 3]] * 3))


@pytest.mark.parametrize("value", [5, "4", 4.0, True, [4]])
def test_a_field_with_an_unsupported_value_is_rejected(value):
    with pytest.raises(WeightError, match="quantization_config: bits is"):
        choice({"bits": value}, "bits", (2, 4), 4)


def test_the_number_of_groups_must_divide_the_features(tmp_path):
    entry = WeightEntry(name="a.scales", path=tmp_path / "x", shape=(3, 8), dtype="F16")
    module = ModuleTensors(prefix="a.", entries={"scales": entry})
    assert group_count(module, "scales", 4, 64) == 4
    for count in (0, 3, 65):
        with pytest.raises(WeightError, match=r"x: weight a\.scales has"):
            group_count(module, "scales", count, 64)
