"""The conformance suite, and cases that it does not cover: splits, lists, fp8, NaN.

This module runs in Triton's interpreter on the host, started by test_triton_attention.py, and
unchanged on a GPU: `pytest -o python_files='interpreted_*.py'
attention_backends/triton/tests/interpreted`. All float32 cases of the suite are run. The
interpreter multiplies in float32 for other dtypes, too, so only their cases with special loads or
stores are run; `-m ""` runs all cases.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_rows import DEVICE, Rows, assert_close, num_splits

from dovetail import LLM, SamplingParams
from dovetail.errors import ContractError
from dovetail_attn_triton.backend import FP8, TritonAttentionBackend
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.ops.rotary import far_apart, rotary_table, turned
from dovetail_devkit.suites.attention import (
    AttentionCase,
    check_case,
    check_rejections,
    reference_attention,
    standard_cases,
)
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.runner.warm_up import STEPS

CASES = [
    case
    for case in standard_cases(TritonAttentionBackend.capabilities)
    if not case.cache_dtype or case.dtype == "bfloat16"  # fp8 with other dtypes has separate tests
    if not TritonAttentionBackend.refusals(case.requirements(DEVICE.type))
]


@pytest.mark.sampled(48)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_backend_passes_the_conformance_suite_in_the_triton_interpreter(case):
    check_case(TritonAttentionBackend, case, DEVICE)


def test_unsupported_requirements_are_rejected():
    check_rejections(TritonAttentionBackend, DEVICE)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("seed", range(6))
def test_random_batches_are_computed_correctly(seed):
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2])
    runs = [(rng.randrange(60), rng.choice([1, 1, 2, rng.randrange(1, 40)])) for _ in range(4)]
    case = AttentionCase(
        runs=((rng.randrange(300), 1), *runs),
        dtype=rng.choice(["float32", "bfloat16", "float16"]),
        num_heads=num_kv_heads * rng.choice([1, 3, 4, 7]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([32, 80, 96, 128]),
        block_size=rng.choice([16, 32, 48]),
        sliding_window=rng.choice([0, 0, rng.randrange(1, 90)]),
        soft_cap=rng.choice([0.0, 0.0, 0.7]),
        sinks=rng.choice([False, True]),
        seed=seed,
    )
    check_case(TritonAttentionBackend, case, DEVICE)


@pytest.mark.parametrize("num_heads", [2, 6, 40])
def test_attention_is_correct_for_any_number_of_heads_per_group(num_heads):
    """One and three query heads per key-value head fit a tile of 16 rows. Twenty do not."""
    case = AttentionCase(runs=((20, 1), (3, 9)), num_heads=num_heads, num_kv_heads=2)
    check_case(TritonAttentionBackend, case, DEVICE)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("window", [0, 400])
def test_a_long_context_is_split_if_the_batch_is_small(window):
    rows = Rows([901, 140], window=window)
    rows.step([900, 139])
    assert num_splits(rows, [1, 1])[0] > 2
    first, second = rows.step([1, 1])
    assert_close(first, rows.want(0, 1))
    assert_close(second, rows.want(1, 1))


def test_split_attention_counts_the_sinks_once():
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE)
    rows = Rows([700], sinks=sinks)
    rows.step([698])
    assert num_splits(rows, [2]) == [3]
    assert_close(rows.step([2])[0], rows.want(0, 2, sinks_H=sinks.cpu()))


def test_a_chunk_of_a_long_prompt_is_split_with_a_causal_mask():
    rows = Rows([340], num_heads=4, num_kv_heads=1)
    rows.step([300])
    assert num_splits(rows, [40])[0] > 1
    assert_close(rows.step([40])[0], rows.want(0, 40))


def test_the_number_of_splits_stays_within_the_option_and_the_workspace():
    for max_splits in (64, 2):
        rows = Rows([900], options={"max_splits": max_splits})
        rows.done = [899]
        assert num_splits(rows, [1]) == [min(max_splits, 3)]
    rows = Rows([900])
    rows.done = [899]
    metadata = rows.builder.build(rows.batch([(0, 1)]))
    floats = torch.empty(2 * rows.heads[0] * (64 + 1) + 1)
    metadata = replace(metadata, workspace=replace(metadata.workspace, parts=floats))
    assert [item.num_splits for item in metadata.passes(rows.layer._shape)] == [2]


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_warm_up_steps_use_every_variant_of_the_launches(group):
    rows = Rows([300, 300], num_heads=2 * group, num_kv_heads=2)
    variants = set()  # of large tiles, lists and splits
    for step in STEPS:
        rows.done = [start for start, _ in step]
        metadata = rows.builder.build(rows.batch([(row, n) for row, (_, n) in enumerate(step)]))
        workspace = replace(metadata.workspace, num_processors=132)
        for item in replace(metadata, workspace=workspace).passes(rows.layer._shape):
            variants.add((item.tile.rows > 16, item.work_W2 is not None, item.num_splits > 1))
    assert variants == {(False, a, b) for a in (0, 1) for b in (0, 1)} | {(1, 1, 0), (1, 1, 1)}


def test_a_step_with_many_prefills_and_decodes_is_computed_correctly():
    lengths = [(1, 6, 2)[row % 3] for row in range(150)]  # more than `list_work` counts at a time
    rows = Rows(lengths, num_heads=4, num_kv_heads=1, head_size=32)
    results = rows.step(lengths)
    for row in (0, 1, 2, 126, 127, 128, 129, 148, 149):
        assert_close(results[row], rows.want(row, lengths[row]))


def test_work_items_start_with_the_last_tokens_of_a_prompt():
    """The last tokens see the most positions, and the longest programs must not start last."""
    rows = Rows([300, 20], num_heads=4, num_kv_heads=1, head_size=32)
    metadata = rows.builder.build(rows.batch([(0, 300), (1, 20)]))
    long = metadata.passes(rows.layer._shape)[0]
    items = long.work_W2[: long.num_items].tolist()
    first_tokens = [first for run, first in items if run == 0]
    assert len(first_tokens) > 2 and first_tokens == sorted(first_tokens, reverse=True)


def test_layers_with_different_shapes_can_run_in_one_step():
    """Each layer shape has its own work list. Later layers of the first shape reuse its list."""
    rows = Rows([60, 41], num_heads=2, num_kv_heads=1)
    wide = TritonAttentionBackend.create_layer(replace(rows.layer_context, num_heads=32))
    rows.step([20, 32])
    runs = [(0, 40), (1, 9)]
    metadata = rows.builder.build(rows.batch(runs))
    q = torch.randn(49, 32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    _, k, v = torch.cat([rows.qkv[0][20:60], rows.qkv[1][32:41]]).split(rows.heads, dim=1)
    out = torch.empty_like(q)
    wide.forward(q, k, v, rows.cache, metadata, out)
    results = rows.forward(runs, metadata, rows.layer)
    out.fill_(torch.nan)
    wide.forward(q, k, v, rows.cache, metadata, out)
    for row, n in runs:
        assert_close(results[row], rows.want(row, n))
    k, v = rows.kept(0)
    assert_close(out[:40], reference_attention(q[:40], k, v, scale=rows.scale))


def test_kv_cache_blocks_may_be_strided():
    rows = Rows([50, 33], padding=64, dtype=torch.float16)
    rows.step([49, 20])
    for row, result in enumerate(rows.step([1, 13])):
        assert_close(result, rows.want(row, len(result)), 4e-3)


def test_nan_in_one_request_does_not_affect_other_requests():
    rows = Rows([40, 40], dtype=torch.bfloat16)
    rows.qkv[0][20] = torch.nan
    rows.step([39, 39])
    first, second = rows.step([1, 1])
    assert first.isnan().all()
    assert second.isfinite().all()


def test_requests_without_scheduled_tokens_are_skipped():
    rows = Rows([20, 20])
    rows.step([20, 20])
    batch = rows.batch([(0, 0), (1, 0)])
    q, k, v = rows.qkv[0][:0].split(rows.heads, dim=1)
    rows.layer.forward(q, k, v, rows.cache, rows.builder.build(batch), torch.empty_like(q))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("rotary_dim", [64, 20])
@pytest.mark.parametrize("cache_dtype", ["", FP8])
def test_fused_rotation_equals_a_separate_rotation(cache_dtype, rotary_dim):
    """The rotation is tested in splits and prefills, for whole and partial heads, with scales."""
    cos_sin_PR = rotary_table(rotary_dim, DEVICE)
    turning = Rows([700, 30], cache_dtype=cache_dtype, padding=64)
    before = Rows([700, 30], cache_dtype=cache_dtype, padding=64)
    turning.cos_sin_PR = cos_sin_PR
    for qkv in before.qkv:
        heads = qkv[:, : sum(before.heads[:2])]
        heads.copy_(turned(heads.clone(), cos_sin_PR[far_apart(0, len(qkv))]))
    for counts in ([698, 10], [2, 12]):
        if counts[0] == 2:
            assert max(num_splits(turning, counts)) > 1
        steps = zip(turning.step(counts), before.step(counts), strict=True)
        for actual, expected in steps:
            assert_close(actual, expected.double(), 1e-2 if cache_dtype else 1e-5)
    for row in (0, 1):
        for actual, expected in zip(turning.kept(row), before.kept(row), strict=True):
            assert_close(actual, expected, 0.2 if cache_dtype else 1e-5)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_an_engine_generates_the_same_tokens_with_triton_and_torch_attention(tmp_path, cache_dtype):
    """The tokens of mixed steps equal those of backend `torch`.

    With fp8, those of the first step do.
    """
    model = write_tiny_llama(tmp_path, head_dim=32)
    answers = []
    for name, dtype in (("torch", "auto"), ("triton", cache_dtype)):
        options = SMALL_ENGINE | {
            "attention_backend": name,
            "kv_cache_dtype": dtype,
            "block_size": 16,
            "skip_tokenizer_init": True,
        }
        with LLM(model, **options) as llm:
            prompts = [[1, 2, 3], list(range(20, 40))]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
    if cache_dtype != "auto":
        answers = [[tokens[:1] for tokens in answer] for answer in answers]
    assert answers[0] == answers[1]


def test_a_layer_rejects_the_metadata_of_another_kv_cache_group():
    rows = Rows([4])
    other = replace(rows.layer_context, sliding_window=4)
    with pytest.raises(ContractError, match=r"layers\.3\.attn has \(window"):
        rows.step([4], TritonAttentionBackend.create_layer(other))
