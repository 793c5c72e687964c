"""The number of groups and `group_size`: incomplete last groups, and contradictions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.errors import WeightError
from end_to_end.quantized_checkpoints import opened
from end_to_end.quantized_writers import awq, gptq, packed_integers

NUM_OUTPUTS = 32


def quantized(written, num_inputs):
    """Return the tensors and values of a weight [32, num_inputs]."""
    return written.quantize((NUM_OUTPUTS, num_inputs), torch.Generator().manual_seed(4))


def without_index(tensors):
    return {leaf: tensor for leaf, tensor in tensors.items() if leaf != "g_idx"}


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_groups"), [(576, 5), (192, 2), (64, 1)])
def test_the_last_group_of_gptq_may_be_incomplete_with_group_indices(
    num_inputs, num_groups, act_order
):
    written = gptq(group_size=128, act_order=act_order)
    tensors, values = quantized(written, num_inputs)
    assert tensors["scales"].shape == (num_groups, NUM_OUTPUTS)
    stored = opened(written, tensors)
    assert torch.equal(stored.dequantize(torch.float32), values.float())
    assert (stored.block_type is None) == (num_groups > 1)


def test_group_indices_that_equal_those_of_smaller_groups_are_checked():
    written = gptq(group_size=128)
    tensors, _ = quantized(written, 576)
    tensors["g_idx"] = (torch.arange(576) // (576 // 5)).to(torch.int32)
    with pytest.raises(WeightError, match="g_idx names a group that is not one of the 5 groups"):
        opened(written, tensors)


@pytest.mark.parametrize("num_inputs", [192, 160, 576])
def test_gptq_without_group_indices_needs_complete_groups(num_inputs):
    written = gptq(group_size=128)
    tensors = without_index(quantized(written, num_inputs)[0])
    with pytest.raises(WeightError, match=rf"{num_inputs} features.* the group_size 128 in quant"):
        opened(written, tensors)


@pytest.mark.parametrize("num_inputs", [192, 160])
def test_awq_needs_complete_groups(num_inputs):
    # AutoAWQ never writes such weights.
    tensors, _ = quantized(awq(num_inputs // 2), num_inputs)
    with pytest.raises(WeightError, match=rf"{num_inputs} features.* the group_size 128 in quant"):
        opened(awq(128), tensors)


@pytest.mark.parametrize("is_indexed", [False, True])
def test_compressed_tensors_needs_complete_groups(is_indexed):
    tensors, _ = quantized(packed_integers(4, 96), 192)
    if is_indexed:
        tensors["weight_g_idx"] = (torch.arange(192) // 128).to(torch.int32)
    with pytest.raises(WeightError, match="the group size 128, which does not divide 192"):
        opened(packed_integers(4, 128), tensors)


def test_groups_must_have_a_size_that_the_configuration_states_for_some_modules():
    base = gptq(group_size=128)
    dynamic = {r"+:.*\.up_proj": {"bits": 8, "group_size": 64}, r"-:.*\.down_proj": {}}
    written = replace(base, config=base.config | {"dynamic": dynamic})
    for group_size in (128, 64):
        tensors, values = quantized(gptq(group_size=group_size), 384)
        for stated in (tensors, without_index(tensors)):
            assert torch.equal(opened(written, stated).dequantize(torch.float32), values.float())
    with pytest.raises(WeightError, match=r"12 groups for 384 .*states the group_size 64 or 128"):
        opened(written, quantized(gptq(group_size=32), 384)[0])
    with pytest.raises(WeightError, match="not a multiple of the group_size 64 or 128"):
        opened(written, without_index(quantized(base, 320)[0]))


@pytest.mark.parametrize("make", [gptq, awq])
def test_one_group_of_fewer_features_is_accepted_without_group_indices(make):
    written = make(group_size=128)
    tensors, values = quantized(make(group_size=64), 64)
    stored = opened(written, without_index(tensors))
    assert torch.equal(stored.dequantize(torch.float32), values.float())
