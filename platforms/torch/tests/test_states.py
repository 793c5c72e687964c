"""Recurrent layers: parts of steps, the memory of states, weights of convolutions, and errors."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from dovetail.errors import ContractError
from dovetail.interfaces import (
    AttentionBatch,
    KVCacheConfig,
    ModelContext,
    StateSpec,
    StateTensor,
)
from dovetail.interfaces.ops import GatedRecurrenceInputs, LinearAttentionInputs
from dovetail.kv_cache.grouping import group_layers
from dovetail_attn_torch.backend import TorchAttentionBackend
from dovetail_devkit.model.dense_attention import DenseAttention
from dovetail_devkit.ops.recurrence import recur_gated
from dovetail_devkit.ops.states import recur
from dovetail_torch.attention.state_parts import StatePartsBuilder, split_tokens
from dovetail_torch.attention_table import CurrentAttention, NoAttention
from dovetail_torch.distributed.shard import Shard, unsharded
from dovetail_torch.layers import (
    Attention,
    CausalConv,
    HeadShape,
    StateLayer,
    TorchLinearMethod,
    TorchOps,
    cache_layers,
)
from dovetail_torch.layers.recurrence import gated_recurrence
from dovetail_torch.layers.state_ops import linear_attention
from dovetail_torch.runner.kv_cache import kv_cache_specs, make_attention
from dovetail_torch.runner.step_limits import StepLimits
from dovetail_torch.weights.assignment import build_weight_table

HOST = torch.device("cpu")
BLOCK_SIZE, MAX_LEN = 4, 64
LIMITS = StepLimits(
    max_num_seqs=3,
    max_num_batched_tokens=64,
    max_model_len=MAX_LEN,
    dtype=torch.float32,
    kv_cache_dtype="float32",
    device=HOST,
)
HEADS = HeadShape(num_heads=2, num_kv_heads=1, head_size=16)
SPEC = StateSpec(block_size=BLOCK_SIZE, num_bytes=64, snapshots=True)
TENSORS = (StateTensor((3, 7), torch.bfloat16, HOST), StateTensor((2, 5, 3), torch.float32, HOST))


def batch_of(requests, num_blocks=20):
    """Return a batch of (start, count), and the block tables."""
    counts = [count for _, count in requests]
    ends = [start + count for start, count in requests]
    width = max(-(-end // BLOCK_SIZE) for end in ends)
    order = torch.randperm(num_blocks * len(requests))[: width * len(requests)] + 1
    firsts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return AttentionBatch(
        query_start_R1=torch.tensor(firsts, dtype=torch.int32),
        seq_lens_R=torch.tensor(ends, dtype=torch.int32),
        block_table_RM=order.view(len(requests), width).to(torch.int32),
        slot_mapping_T=torch.zeros(sum(counts), dtype=torch.int64),
        query_lens=counts,
        seq_lens=ends,
    )


def test_tokens_are_split_at_the_ends_of_blocks():
    source = random.Random(3)
    for _ in range(200):
        requests = [
            (source.randrange(20), source.randint(1, 20)) for _ in range(source.randint(1, 4))
        ]
        batch = batch_of(requests)
        sizes, num_parts, reads, writes = [], [], [], []
        for table, (start, count) in zip(batch.block_table_RM.tolist(), requests, strict=True):
            ends = [e for e in range(start + 1, start + count) if e % BLOCK_SIZE == 0]
            begins = [start, *ends]
            ends.append(start + count)
            num_parts.append(len(ends))
            sizes += [end - begin for begin, end in zip(begins, ends, strict=True)]
            reads += [table[(begin - 1) // BLOCK_SIZE] if begin else -1 for begin in begins]
            writes += [table[(end - 1) // BLOCK_SIZE] for end in ends]
        parts = split_tokens(batch, BLOCK_SIZE)
        assert (list(parts.sizes), list(parts.num_parts)) == (sizes, num_parts)
        assert (parts.reads_N.tolist(), parts.writes_N.tolist()) == (reads, writes)
        assert parts.reads_N.dtype == parts.writes_N.dtype == torch.int64


def made(layers, backend=TorchAttentionBackend):
    specs = kv_cache_specs(backend, layers, block_size=BLOCK_SIZE, limits=LIMITS)
    groups = group_layers([specs], block_size=BLOCK_SIZE, max_model_len=MAX_LEN)
    config = KVCacheConfig(num_blocks=9, groups=groups)

    def zeros(num_bytes):
        return torch.zeros(num_bytes, dtype=torch.uint8)

    return make_attention(backend, layers, config, LIMITS, options={}, zeros=zeros), config


@pytest.mark.parametrize("num_attention_layers", [0, 2])
def test_each_layer_has_its_own_state_in_each_block(num_attention_layers):
    attention = [Attention(HEADS, index) for index in range(num_attention_layers)]
    states = [StateLayer(num_attention_layers + index, TENSORS) for index in range(3)]
    layers = dict(cache_layers(nn.ModuleList([*attention, *states])))
    backend = TorchAttentionBackend if attention else None
    made_state, config = made(layers, backend)
    table = made_state.table
    table.metadata = [
        builder.build(batch_of([(0, 3), (5, 4)])) for builder, _ in made_state.builders
    ]
    tensors = [state(table).tensors for state in states]
    for number, layer in enumerate(tensors):
        for tensor, expected in zip(layer, TENSORS, strict=True):
            assert tensor.shape == (config.num_blocks, *expected.shape)
            assert tensor.dtype == expected.dtype
        for block in range(config.num_blocks):
            layer[0][block] = 10 * number + block
            layer[1][block] = 100 + 10 * number + block
    for number, layer in enumerate(tensors):
        for block in range(config.num_blocks):
            assert (layer[0][block] == 10 * number + block).all()
            assert (layer[1][block] == 100 + 10 * number + block).all()
    assert made_state.buffers.pages_NP and not made_state.supports_graphs
    assert made_state.supports_advance == (not attention)


def test_state_parts_have_the_same_addresses_in_every_step_and_can_be_advanced():
    source, builder = random.Random(5), StatePartsBuilder(SPEC, LIMITS)
    addresses = set()
    for _ in range(100):
        num_requests, left = source.randint(1, LIMITS.max_num_seqs), LIMITS.max_num_batched_tokens
        requests = [(source.randrange(20), source.randint(1, left // 3)) for _ in "abc"]
        batch = batch_of(requests[:num_requests])
        parts, expected = builder.build(batch), split_tokens(batch, BLOCK_SIZE)
        memory = parts.memory
        fields = (memory.num_parts_R, memory.sizes_N, memory.reads_N, memory.writes_N)
        addresses.add((memory.num_requests_1.data_ptr(), *(x.data_ptr() for x in fields)))
        assert memory.num_requests_1.tolist() == [num_requests]
        values = (
            expected.num_parts,
            expected.sizes,
            expected.reads_N.tolist(),
            expected.writes_N.tolist(),
        )
        for field, numbers in zip(fields, values, strict=True):
            assert field[: len(numbers)].tolist() == list(numbers)
        assert (parts.reads_N.tolist(), parts.writes_N.tolist()) == values[2:]
    assert len(addresses) == 1
    for requests in (
        [(5, 1), (0, 1)],
        [(9, 1), (2, 1), (12, 1)],
    ):  # within blocks
        batch = batch_of(requests)
        parts = builder.build(batch)
        builder.advance()
        later = replace(batch, seq_lens=[end + 1 for end in batch.seq_lens])
        expected = split_tokens(later, BLOCK_SIZE)
        assert parts.reads_N.tolist() == expected.reads_N.tolist()
        assert parts.writes_N.tolist() == expected.writes_N.tolist()


def test_the_states_that_a_step_overwrites_are_restored():
    layers = {"0": StateLayer(0, TENSORS), "1": StateLayer(1, TENSORS)}
    state, _ = made(layers, None)
    table = state.table
    table.metadata = [builder.build(batch_of([(5, 1)], 2)) for builder, _ in state.builders]
    tensors = [tensor for layer in layers.values() for tensor in layer(table).tensors]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    num_bytes = sum(tensor[0].nbytes for tensor in tensors)
    assert table.save_states(num_bytes - 1) is None
    restore = table.save_states(num_bytes)
    for tensor in tensors:
        tensor[table.metadata[0].writes_N] = 3
    restore()
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_decays_after_a_strong_decay_are_precise():
    """A sum of decays from the beginning of a chunk, in float32, would have an error of 2e-4."""
    torch.manual_seed(0)
    steps_TH = torch.full((64, 1), -4.0)
    steps_TH[:40] = 100.0
    inputs = LinearAttentionInputs(
        q_TGK=torch.ones(64, 1, 1),
        k_TGK=torch.ones(64, 1, 1),
        v_THV=torch.ones(64, 1, 1),
        steps_TH=steps_TH,
        step_bias_H=torch.zeros(1),
        rates_H=torch.tensor([-1.0]),
    )
    batch = batch_of([(0, 64)], 20)
    parts = split_tokens(batch, 64)
    parts = replace(parts, writes_N=torch.tensor([0]))
    expected, actual = (torch.zeros(1, 1, 1, 1) for _ in range(2))
    result = linear_attention(inputs, actual, parts)
    wanted = recur(inputs, expected, parts)
    assert torch.allclose(result.double(), wanted, rtol=3e-6, atol=0)
    assert torch.allclose(actual, expected, rtol=3e-6, atol=0)


def test_a_long_recurrence_is_precise_and_a_nan_stays_in_its_request():
    """The number of tokens of the second request is not a multiple of the size of a chunk."""
    torch.manual_seed(0)
    counts, num_channels = (3, 300, 1), 5
    values = torch.randn(3, sum(counts), num_channels)
    inputs = GatedRecurrenceInputs(
        x_TC=values[0],
        input_gates_TC=values[1],
        decay_gates_TC=8 * values[2],
        input_bias_C=torch.zeros(num_channels),
        decay_bias_C=torch.zeros(num_channels),
        rates_C=torch.tensor([-1e-7, -1e-3, -0.1, -20.0, -1e4]),
    )
    parts = split_tokens(batch_of([(0, count) for count in counts], 80), 1000)
    parts = replace(parts, writes_N=torch.arange(3))
    expected, actual = (torch.zeros(3, num_channels) for _ in range(2))
    wanted = recur_gated(inputs, expected, parts)
    # For the slowest decay, 1 - a² in float32 would not have a single correct digit.
    result = gated_recurrence(inputs, actual, parts)
    assert torch.allclose(result.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    inputs.x_TC[1] = torch.nan
    result = gated_recurrence(inputs, actual, parts)
    assert result.isnan().any(-1).tolist() == [False, True, True, *[False] * 301]


def test_the_cache_spec_of_a_state_has_its_size_and_snapshots():
    layers = {"state": StateLayer(0, TENSORS)}
    specs = kv_cache_specs(None, layers, block_size=BLOCK_SIZE, limits=LIMITS)
    # 3 · 7 · 2 = 42 and 2 · 5 · 3 · 4 = 120 bytes, aligned to 64
    assert specs == {"state": StateSpec(block_size=BLOCK_SIZE, num_bytes=192, snapshots=True)}


@pytest.mark.parametrize("tensors", [(), (StateTensor((3, 0), torch.float32, HOST),)])
def test_an_empty_state_is_rejected(tensors):
    with pytest.raises(ContractError, match="layer 4 has a state of the tensors"):
        StateLayer(4, tensors)


def test_attention_layers_and_recurrent_layers_share_their_indices():
    model = nn.ModuleList([Attention(HEADS, 1), StateLayer(1, TENSORS)])
    with pytest.raises(ContractError, match=r"recurrent layers the indices \[1, 1\]"):
        cache_layers(model)


def test_runs_without_a_cache_have_new_states():
    state = NoAttention(1, num_tokens=9, num_requests=4).state(0, TENSORS)
    assert state.parts.sizes == (6, 1, 1, 1) and state.parts.num_parts == (1, 1, 1, 1)
    assert state.parts.reads_N.tolist() == [-1] * 4
    assert [tuple(tensor.shape) for tensor in state.tensors] == [(1, 3, 7), (1, 2, 5, 3)]
    with pytest.raises(
        ContractError, match="layer 1 of the model is recurrent, but the model has 1 modules"
    ):
        NoAttention(1).state(1, TENSORS)
    with pytest.raises(ContractError, match="cannot be traced"):
        CurrentAttention().state(0, TENSORS)


def context(dtype=torch.float32):
    return ModelContext(
        hf_config={},
        dtype=dtype,
        device=HOST,
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=MAX_LEN,
    )


def test_each_rank_loads_its_part_of_each_group_of_channels():
    parts = {"x": Shard(start=4, size=4, whole=8), "b": unsharded(3)}
    conv = CausalConv(context(), parts, 4, bias=True)
    table = build_weight_table(nn.ModuleDict({"conv1d": conv}))
    weights = {"conv1d.x.weight": 8, "conv1d.b.weight": 3, "conv1d.x.bias": 8, "conv1d.b.bias": 3}
    assert table.assignments.keys() == weights.keys()
    for name, num_channels in weights.items():
        shape = (num_channels, 1, 4) if name.endswith("weight") else (num_channels,)
        assert table.assignments[name].shape == shape
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        table.assignments[name].fill(whole + 1000 * ("b." in name))
    assert conv.bias.tolist() == [4, 5, 6, 7, 1000, 1001, 1002]
    assert conv.weight[:, 0, 0].tolist() == [16, 20, 24, 28, 1000, 1004, 1008]
    one = CausalConv(context(), {"all": Shard(start=2, size=2, whole=4)}, 2, bias=False)
    table = build_weight_table(nn.ModuleDict({"conv1d": one}))
    assert list(table.assignments) == ["conv1d.weight"]
    table.assignments["conv1d.weight"].fill(torch.arange(8.0).view(4, 1, 2))
    assert one.weight.flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("activated", [True, False])
def test_a_convolution_continues_with_the_last_inputs_of_its_state(activated):
    torch.manual_seed(0)
    conv = CausalConv(context(), {"all": unsharded(6)}, 4, bias=True, activated=activated)
    for parameter in conv.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x_TC = torch.randn(11, 6)
    padded = torch.nn.functional.pad(x_TC.T, (3, 0))
    expected = torch.nn.functional.conv1d(padded, conv.weight, conv.bias, groups=6).T
    if activated:
        expected = torch.nn.functional.silu(expected)
    attention, layer = DenseAttention(), StateLayer(0, (conv.state,))
    done = []
    for start, count in ((0, 1), (1, 2), (3, 7), (10, 1)):
        attention.begin([(2, count)])
        state = layer(attention)
        done.append(conv(x_TC[start : start + count], state.tensors[0], state.parts))
    assert torch.allclose(torch.cat(done), expected, atol=1e-5)
