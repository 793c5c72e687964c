"""Rotary tables are filled when positions are used, and are bitwise equal to a full table."""

import pytest
import torch
from torch import nn

from dovetail.interfaces.model import ModelContext
from dovetail_torch.layers import RotaryEmbedding, TorchLinearMethod, TorchOps
from dovetail_torch.layers.rope_frequencies import read_rope_parameters, rope_frequencies
from dovetail_torch.positions import PositionTables

NUM_POSITIONS = 9001
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def make(head_size, config=None, *, num_positions=NUM_POSITIONS, device="cpu"):
    context = ModelContext(
        hf_config=config or {},
        dtype=torch.float32,
        device=torch.device(device),
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=num_positions,
    )
    return RotaryEmbedding(context, head_size)


def computed_at_once(head_size, config):
    frequency_F, factor = rope_frequencies(read_rope_parameters(config), head_size)
    angle_PF = torch.arange(NUM_POSITIONS, dtype=torch.float32)[:, None] * frequency_F
    return torch.cat((angle_PF.cos(), angle_PF.sin()), dim=-1) * factor


@pytest.mark.parametrize("head_size", [4, 10, 36, 64, 128])
@pytest.mark.parametrize("config", [{}, {"rope_parameters": YARN}], ids=["default", "yarn"])
def test_a_rotary_table_that_grows_is_bitwise_equal_to_a_complete_table(head_size, config):
    rotary = make(head_size, config)
    address = rotary.cos_sin_PR.data_ptr()
    tables = PositionTables(nn.ModuleList([rotary]))
    assert 1 <= tables.num_ready < NUM_POSITIONS
    assert not rotary.cos_sin_PR[tables.num_ready :].any()
    for num_positions in (4097, 4100, 8200, NUM_POSITIONS + 50):
        tables.grow(num_positions)
        assert tables.num_ready >= num_positions
    assert torch.equal(rotary.cos_sin_PR, computed_at_once(head_size, config))
    assert rotary.cos_sin_PR.data_ptr() == address


def test_without_a_runner_the_rotary_table_is_filled_completely_at_the_first_use():
    rotary = make(8)
    q_THS = torch.ones(1, 1, 8)
    rotary(q_THS, q_THS, torch.tensor([NUM_POSITIONS - 1]))
    assert torch.equal(rotary.cos_sin_PR, computed_at_once(8, {}))


def test_short_rotary_tables_and_tables_on_other_devices_are_filled_at_creation():
    for rotary in (make(8, num_positions=4096), make(8, device="meta")):
        assert PositionTables(rotary).num_ready > NUM_POSITIONS
    assert PositionTables(nn.Linear(1, 1)).num_ready > NUM_POSITIONS
