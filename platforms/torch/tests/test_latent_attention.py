"""Attention layers whose values are parts of their keys: specs, memory, padding and results."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dovetail.errors import ContractError
from dovetail.interfaces import (
    AttentionBatch,
    AttentionFacts,
    FullAttentionSpec,
    KVCacheConfig,
    LatentAttentionSpec,
)
from dovetail.kv_cache.grouping import group_layers
from dovetail_devkit.attention.reference import reference_attention
from dovetail_devkit.fakes.attention import FakeAttentionBackend
from dovetail_torch.attention_table import NoAttention
from dovetail_torch.layers import Attention, HeadShape, LatentAttention, attention_layers
from dovetail_torch.layers.attention import attention_facts
from dovetail_torch.runner.kv_cache import kv_cache_specs, make_attention
from dovetail_torch.runner.step_limits import StepLimits

CPU = torch.device("cpu")
NUM_LAYERS, BLOCK_SIZE, T = 3, 4, 6
HEADS = HeadShape(num_heads=5, num_kv_heads=1, head_size=24)
VALUE_SIZE = 17
LIMITS = StepLimits(
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=32,
    dtype=torch.float32,
    kv_cache_dtype="float32",
    device=CPU,
)


class Padding(FakeAttentionBackend):
    """A backend that stores larger heads than the layers have."""

    capabilities = replace(FakeAttentionBackend.capabilities, head_sizes=frozenset({32}))


def make_layers():
    model = nn.ModuleList(
        LatentAttention(HEADS, index, scale=0.3, value_size=VALUE_SIZE)
        for index in range(NUM_LAYERS)
    )
    return dict(attention_layers(model))


def zeros(num_bytes):
    return torch.zeros(num_bytes, dtype=torch.uint8)


def make_config(backend, layers):
    specs = kv_cache_specs(backend, layers, block_size=BLOCK_SIZE, limits=LIMITS)
    groups = group_layers([specs], block_size=BLOCK_SIZE, max_model_len=32)
    return specs, KVCacheConfig(num_blocks=7, groups=groups)


def test_a_block_has_the_bytes_of_one_key_per_token_and_layer():
    specs, config = make_config(FakeAttentionBackend, make_layers())
    for spec in specs.values():
        assert type(spec) is LatentAttentionSpec
        assert (spec.head_size, spec.num_kv_heads, spec.value_size) == (24, 1, VALUE_SIZE)
        assert spec.page_size_bytes == BLOCK_SIZE * 24 * 4
    assert len(config.groups) == 1
    assert config.bytes_per_block == NUM_LAYERS * BLOCK_SIZE * 24 * 4


def test_a_layer_with_separate_values_has_a_different_spec():
    layers = make_layers() | {"last": Attention(HEADS, NUM_LAYERS)}
    specs, config = make_config(FakeAttentionBackend, layers)
    assert type(specs["last"]) is FullAttentionSpec
    assert specs["last"].page_size_bytes == 2 * specs["0"].page_size_bytes
    assert {type(group.spec) for group in config.groups} == {FullAttentionSpec, LatentAttentionSpec}


def test_the_attention_facts_state_that_values_are_parts_of_keys():
    layers = make_layers()
    assert attention_facts(layers.values()) == AttentionFacts(
        head_size=24, num_heads=5, num_kv_heads=1, mla=True
    )
    assert not attention_facts([Attention(HEADS, 0)]).mla


@pytest.mark.parametrize("size", [0, 25])
def test_values_larger_than_their_keys_are_rejected(size):
    with pytest.raises(ContractError, match=f"layer 1 has values of {size} features in keys of 24"):
        LatentAttention(HEADS, 1, value_size=size)
    assert LatentAttention(HEADS, 1, value_size=24).value_size == 24


def batch(start, count):
    """Return the batch of one request's next `count` tokens. It has the blocks 2, 3 and 4."""
    table = torch.tensor([[2, 3, 4]], dtype=torch.int32)
    return AttentionBatch(
        query_start_R1=torch.tensor([0, count], dtype=torch.int32),
        seq_lens_R=torch.tensor([start + count], dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=torch.arange(start, start + count) + 2 * BLOCK_SIZE,
        query_lens=(count,),
        seq_lens=(start + count,),
    )


@pytest.mark.parametrize("backend", [FakeAttentionBackend, Padding])
def test_padded_and_unpadded_layers_return_results_of_the_value_size(backend):
    layers = make_layers()
    _, config = make_config(backend, layers)
    state = make_attention(backend, layers, config, LIMITS, options={}, zeros=zeros)
    sizes = {cache.shape[-1] for cache in state.buffers.caches.values()}
    assert sizes == {32 if backend is Padding else 24}
    generator = torch.Generator().manual_seed(1)
    q_THD, k_TKD = (torch.randn(T, heads, 24, generator=generator) for heads in (5, 1))
    expected = reference_attention(q_THD, k_TKD, k_TKD[..., :VALUE_SIZE], scale=0.3)
    results = []
    for start, count in ((0, 4), (4, 1), (5, 1)):
        state.table.metadata = [builder.build(batch(start, count)) for builder, _ in state.builders]
        q, k = (x[start : start + count] for x in (q_THD, k_TKD))
        results.append(state.table.attend(1, q, k, k[..., :VALUE_SIZE]))
    actual = torch.cat(results)
    assert actual.shape == (T, 5, VALUE_SIZE) and actual.is_contiguous()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


def test_runs_without_a_kv_cache_return_results_of_the_value_size():
    k_TKD = torch.ones(T, 1, 24)
    out = NoAttention(1).attend(0, torch.ones(T, 5, 24), k_TKD, k_TKD[..., :VALUE_SIZE])
    assert out.shape == (T, 5, VALUE_SIZE) and not out.any()


def test_a_compiled_call_returns_results_of_the_value_size():
    layers = make_layers()
    _, config = make_config(FakeAttentionBackend, layers)
    state = make_attention(FakeAttentionBackend, layers, config, LIMITS, options={}, zeros=zeros)
    state.table.metadata = [builder.build(batch(0, T)) for builder, _ in state.builders]

    def attend(q_THD, k_TKD):
        return state.table.attend(0, q_THD, k_TKD, k_TKD[..., :VALUE_SIZE]) * 2

    tensors = torch.randn(T, 5, 24), torch.randn(T, 1, 24)
    compiled = torch.compile(attend, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), attend(*tensors))
