"""Attention within chunks: divided requests, results of any backend, and rejected sizes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from dovetail.errors import ConfigError, ContractError
from dovetail.interfaces import AttentionBatch, KVCacheConfig
from dovetail.kv_cache.grouping import group_layers
from dovetail_devkit.attention.batch import check_batch
from dovetail_devkit.attention.reference import reference_attention
from dovetail_devkit.fakes.attention import FakeAttentionBackend, FakeAttentionBuilder
from dovetail_torch.attention.chunked_runs import split_runs
from dovetail_torch.layers import Attention, ChunkedAttention, HeadShape, attention_layers
from dovetail_torch.runner.kv_cache import kv_cache_specs, make_attention
from dovetail_torch.runner.step_limits import StepLimits

BLOCK_SIZE, CHUNK_SIZE, MAX_LEN = 4, 8, 40
HEADS = HeadShape(num_heads=4, num_kv_heads=2, head_size=16)
LIMITS = StepLimits(
    max_num_seqs=3,
    max_num_batched_tokens=64,
    max_model_len=MAX_LEN,
    dtype=torch.float32,
    kv_cache_dtype="float32",
    device=torch.device("cpu"),
)


class DecodesFirst(FakeAttentionBackend):
    """A backend that requires decodes before prefills."""

    @staticmethod
    def create_builder(context):
        builder = FakeAttentionBuilder(context)
        builder.reorder_threshold = 1
        return builder


def make_state(backend=FakeAttentionBackend, chunk_size=CHUNK_SIZE):
    """Return the attention of a chunked layer and a layer with full attention."""
    model = nn.ModuleList([ChunkedAttention(HEADS, 0, chunk_size=chunk_size), Attention(HEADS, 1)])
    layers = dict(attention_layers(model))
    specs = kv_cache_specs(backend, layers, block_size=BLOCK_SIZE, limits=LIMITS)
    groups = group_layers([specs], block_size=BLOCK_SIZE, max_model_len=MAX_LEN)
    config = KVCacheConfig(num_blocks=40, groups=groups)

    def zeros(num_bytes):
        return torch.zeros(num_bytes, dtype=torch.uint8)

    return make_attention(backend, layers, config, LIMITS, options={}, zeros=zeros)


def make_batch(runs):
    """Return a batch of scheduled requests (row, start, count).

    Row r has the blocks from 10 · r + 1.
    """
    counts = [count for _, _, count in runs]
    ends = [start + count for _, start, count in runs]
    width = -(-max(ends) // BLOCK_SIZE)
    table = torch.zeros(len(runs), width, dtype=torch.int32)
    slots = []
    for index, (row, start, count) in enumerate(runs):
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        table[index, :num_blocks] = torch.arange(num_blocks) + 10 * row + 1
        slots += [(10 * row + 1) * BLOCK_SIZE + start + i for i in range(count)]
    return AttentionBatch(
        query_start_R1=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens_R=torch.tensor(ends, dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=torch.tensor(slots),
        query_lens=counts,
        seq_lens=ends,
    )


def test_the_tokens_of_a_request_are_split_at_attention_chunk_boundaries():
    divided = split_runs(make_batch([(0, 6, 11), (1, 16, 1)]), CHUNK_SIZE, BLOCK_SIZE)
    check_batch(divided, BLOCK_SIZE)
    assert list(divided.query_lens) == [2, 8, 1, 1]
    assert list(divided.seq_lens) == [8, 8, 1, 1]
    assert divided.block_table_RM.tolist() == [[1, 2], [3, 4], [5, 0], [15, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_become_valid_batches_of_the_same_tokens(seed):
    source = random.Random(seed)
    runs = []
    for row in range(3):
        start = source.randrange(MAX_LEN)
        runs.append((row, start, source.randint(1, MAX_LEN - start)))
    batch = make_batch(runs)
    divided = split_runs(batch, CHUNK_SIZE, BLOCK_SIZE)
    check_batch(divided, BLOCK_SIZE)
    assert sum(divided.query_lens) == sum(batch.query_lens)
    assert max(divided.seq_lens) <= CHUNK_SIZE
    positions = [p for _, start, count in runs for p in range(start, start + count)]
    lens = zip(divided.query_lens, divided.seq_lens, strict=True)
    local = [p for count, length in lens for p in range(length - count, length)]
    assert local == [position % CHUNK_SIZE for position in positions]


@pytest.mark.parametrize("sizes", [(37,), (5, 1, 1, 1, 9, 20), (8, 8, 1, 16, 4)])
def test_each_attention_chunk_of_a_prompt_gives_the_result_of_that_chunk_alone(sizes):
    state = make_state()
    assert len(state.builders) == 2
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(37, heads, 16, generator=generator) for heads in (4, 2, 2))
    results, start = [[], []], 0
    for count in sizes:
        own = slice(start, start + count)
        batch = make_batch([(0, start, count)])
        state.table.metadata = [builder.build(batch) for builder, _ in state.builders]
        for layer in (0, 1):
            results[layer].append(state.table.attend(layer, q[own], k[own], v[own]))
        start += count
    chunks = [slice(first, first + CHUNK_SIZE) for first in range(0, 37, CHUNK_SIZE)]
    alone = [reference_attention(q[own], k[own], v[own], scale=0.25) for own in chunks]
    full = reference_attention(q, k, v, scale=0.25)
    for actual, expected in zip(results, (torch.cat(alone), full), strict=True):
        torch.testing.assert_close(torch.cat(actual).double(), expected, rtol=0, atol=1e-5)


def test_requests_are_not_split_if_the_chunk_covers_the_longest_sequence():
    state = make_state(chunk_size=MAX_LEN + 1)
    assert len(state.builders) == 1


def test_a_block_size_that_does_not_divide_the_chunk_is_rejected():
    with pytest.raises(ConfigError, match=r"chunks of 6 tokens.*block size 4.*divides 6"):
        make_state(chunk_size=6)
    make_state(chunk_size=12)


def test_reordering_requests_for_a_backend_does_not_change_the_results():
    """The fake builder rejects a batch in which a run of one token follows a longer run."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(20, heads, 16, generator=generator) for heads in (4, 2, 2))
    batch = make_batch([(0, 0, 9), (1, 0, 11)])  # parts of 8, 1, 8 and 3 tokens
    results = []
    for backend in (FakeAttentionBackend, DecodesFirst):
        state = make_state(backend)
        state.table.metadata = [builder.build(batch) for builder, _ in state.builders]
        results.append([state.table.attend(layer, q, k, v) for layer in (0, 1)])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("size", [0, -8])
def test_a_chunk_without_tokens_is_rejected(size):
    with pytest.raises(ContractError, match=f"layer 3 has chunks of {size} tokens"):
        ChunkedAttention(HEADS, 3, chunk_size=size)
