"""The `torch` backend: the conformance suite, batching, and unsupported requirements."""

from __future__ import annotations

import random

import pytest
import torch

from dovetail.errors import ConfigError, ContractError
from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_torch.backend import TorchAttentionBackend
from dovetail_attn_torch.metadata import group_by_length
from dovetail_devkit.fakes.attention import FakeAttentionBackend
from dovetail_devkit.suites.attention import AttentionCase, check_attention, check_case

CPU = torch.device("cpu")


@pytest.mark.costly
@pytest.mark.parametrize("backend", [TorchAttentionBackend, FakeAttentionBackend])
def test_backend_passes_the_conformance_suite(backend):
    check_attention(backend, CPU)


def test_backend_passes_the_suite_in_inference_mode():
    with torch.inference_mode():
        check_case(TorchAttentionBackend, AttentionCase(runs=((3, 1), (0, 5), (7, 3))), CPU)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_are_computed_correctly(seed):
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3])
    runs = [(rng.randrange(90), rng.choice([1, 1, rng.randrange(1, 30)])) for _ in range(12)]
    case = AttentionCase(
        runs=tuple(runs),
        dtype=rng.choice(["float32", "bfloat16", "float16"]),
        num_heads=num_kv_heads * rng.choice([1, 3, 4]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([1, 7, 16, 64, 96]),
        block_size=rng.choice([1, 2, 7, 16, 32]),
        sliding_window=rng.choice([0, 0, rng.randrange(1, 60)]),
        soft_cap=rng.choice([0.0, 0.0, 0.7]),
        sinks=rng.choice([False, False, True]),
        seed=seed,
    )
    check_case(TorchAttentionBackend, case, CPU)


@pytest.mark.parametrize("seed", range(8))
def test_random_batches_of_latent_attention_are_computed_correctly(seed):
    rng = random.Random(seed)
    runs = [(rng.randrange(90), rng.choice([1, 1, rng.randrange(1, 30)])) for _ in range(12)]
    size = rng.choice([2, 20, 64, 96])
    case = AttentionCase(
        runs=tuple(runs),
        dtype=rng.choice(["float32", "bfloat16", "float16"]),
        num_heads=rng.choice([1, 3, 8]),
        num_kv_heads=1,
        head_size=size,
        value_size=rng.randrange(1, size + 1),
        block_size=rng.choice([1, 2, 7, 16, 32]),
        soft_cap=rng.choice([0.0, 0.0, 0.7]),
        sliding_window=rng.choice([0, 0, rng.randrange(1, 60)]),
        seed=seed,
    )
    check_case(TorchAttentionBackend, case, CPU)


@pytest.mark.costly
def test_the_heads_of_deepseek_v3_are_computed_correctly():
    runs = ((40, 1), (0, 9), (33, 3), (7, 1))
    case = AttentionCase(
        runs=runs, num_heads=128, num_kv_heads=1, head_size=576, value_size=512, scale_factor=0.5
    )
    check_case(TorchAttentionBackend, case, CPU)


def test_the_cache_of_latent_attention_has_one_vector_per_token():
    case = AttentionCase(runs=((1, 1),), num_kv_heads=1, head_size=576, value_size=512)
    assert case.spec.page_size_bytes == 16 * 576 * 4
    assert TorchAttentionBackend.kv_cache_shape(5, case.spec) == (5, 16, 1, 1, 576)


@pytest.mark.costly
def test_many_long_decodes_are_computed_in_several_batches():
    # 8 KiB per token: 4 MiB hold 512 tokens, fewer than the 1,140 visible ones.
    runs = tuple((91 + row, 1) for row in range(12))
    case = AttentionCase(runs=runs, num_heads=8, num_kv_heads=8, head_size=128)
    assert len(build(runs, case).decodes) > 1
    check_case(TorchAttentionBackend, case, CPU)


@pytest.mark.parametrize("changes", [{"soft_cap": 1.0}, {"sinks": True}], ids=["capped", "sinks"])
def test_large_score_matrices_are_computed_in_tiles(monkeypatch, changes):
    monkeypatch.setattr("dovetail_attn_torch.formula.MAX_SCORES", 500)
    for window in (0, 4):
        runs = ((0, 40), (9, 30), (5, 1))
        check_case(
            TorchAttentionBackend,
            AttentionCase(runs=runs, sliding_window=window, **changes),
            CPU,
        )


def test_sinks_reduce_the_weight_of_tokens():
    """With n equal scores and a sink equal to them, the sink gets 1 / (n + 1) of the weight."""
    context = layer_context(num_heads=2, sinks=torch.tensor([0.0, -torch.inf]))
    layer = TorchAttentionBackend.create_layer(context)
    q, cache = torch.zeros(3, 2, 64), torch.zeros(8, 16, 2, 2, 64)
    k, v, out = torch.zeros(3, 2, 64), torch.ones(3, 2, 64), torch.empty(3, 2, 64)
    layer.forward(q, k, v, cache, build(((0, 3),)), out)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1 / 2, 2 / 3, 3 / 4]))
    assert torch.equal(out[:, 1], torch.ones(3, 64))


def test_decodes_of_equal_length_in_consecutive_rows_need_no_mask_and_no_copy():
    (decodes,) = build(((10, 1),) * 3).decodes
    assert decodes.mask_G1QL is None
    assert decodes.tokens == slice(0, 3)


def test_a_decode_with_a_window_gathers_only_the_window():
    (decodes,) = build(((60, 1),), AttentionCase(runs=(), sliding_window=8)).decodes
    assert decodes.slots_S.tolist() == list(range(53 + 16, 61 + 16))
    assert decodes.mask_G1QL is None


def test_a_prefill_within_its_window_gathers_no_keys():
    case = AttentionCase(runs=(), sliding_window=8)
    metadata = build(((0, 8), (0, 9)), case)
    assert metadata.prefills == (slice(0, 8),)
    assert [chunk.tokens for chunk in metadata.chunks] == [slice(8, 17)]


def test_a_request_without_scheduled_tokens_is_skipped():
    metadata = build(((5, 0), (5, 2)))
    assert not metadata.decodes
    assert not metadata.prefills
    assert [chunk.tokens for chunk in metadata.chunks] == [slice(0, 2)]


def test_requests_of_similar_length_are_grouped_within_the_slot_limit():
    lengths = [4000, 10, 3900, 10, 100, 2000, 10]
    groups = group_by_length(range(7), lengths, 8000)
    assert groups == [[0, 2], [5], [4, 1, 3, 6]]
    assert group_by_length(range(7), lengths, 100) == [[0], [2], [5], [4], [1, 3, 6]]
    assert group_by_length([], lengths, 100) == []


def test_a_layer_rejects_a_kv_cache_group_with_a_different_sliding_window():
    layer = TorchAttentionBackend.create_layer(layer_context(sliding_window=4))
    q, k, cache = torch.zeros(1, 8, 64), torch.zeros(1, 2, 64), torch.zeros(8, 16, 2, 2, 64)
    with pytest.raises(ContractError, match=r"layers\.3\.attn has a sliding window of 4"):
        layer.forward(q, k, k, cache, build(((0, 1),)), q.clone())


def test_heads_that_do_not_divide_evenly_are_rejected():
    with pytest.raises(ConfigError, match="8 query heads and 3 key-value heads"):
        TorchAttentionBackend.create_layer(layer_context(num_kv_heads=3))


def test_an_unsupported_cache_dtype_is_rejected():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="fp8_e4m3"):
        TorchAttentionBackend.create_builder(group_context(spec))


def layer_context(**changes):
    values = {
        "layer_name": "layers.3.attn",
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "scale": 0.125,
        "dtype": torch.float32,
        "device": CPU,
    }
    return AttentionLayerContext(**(values | changes))


def group_context(spec):
    return AttentionGroupContext(
        spec=spec, device=CPU, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=512
    )


def build(runs, case=None):
    """Return the metadata of requests (context_len, query_len) with consecutive blocks."""
    case = case or AttentionCase(runs=())
    seq_lens = [sum(run) for run in runs]
    query_lens = [query_len for _, query_len in runs]
    width = max(seq_lens) // case.block_size + 1
    table = torch.arange(1, len(runs) * width + 1, dtype=torch.int32).view(len(runs), width)
    batch = AttentionBatch(
        query_start_R1=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=torch.arange(sum(query_lens)) + case.block_size,
        query_lens=query_lens,
        seq_lens=seq_lens,
    )
    return TorchAttentionBackend.create_builder(group_context(case.spec)).build(batch)
