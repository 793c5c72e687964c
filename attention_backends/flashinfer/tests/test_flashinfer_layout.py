"""Page lists and page tables of a step, compared with lists that Python loops compute."""

from __future__ import annotations

import random

import pytest
import torch

from dovetail.interfaces.attention import AttentionBatch
from dovetail_attn_flashinfer.layout import StepLayout, without_empty_runs

B = 16


def make_batch(runs, *, extra=3):
    """Return a batch of requests (context, queries), each with different blocks."""
    width = max(-(-sum(run) // B) for run in runs) + extra
    table = torch.arange(1, len(runs) * width + 1, dtype=torch.int32).view(len(runs), width)
    query_lens = [n for _, n in runs]
    return AttentionBatch(
        query_start_R1=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens_R=torch.tensor([sum(run) for run in runs], dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=torch.zeros(sum(query_lens), dtype=torch.int64),
        query_lens=query_lens,
        seq_lens=[sum(run) for run in runs],
    )


def seen_blocks(run, row, table, window):
    """Return the ids of the blocks that contain a position that a query of the request sees."""
    context, n = run
    first = max(0, context - window + 1) if window else 0
    return [int(table[row, at]) for at in sorted({p // B for p in range(first, context + n)})]


def random_runs(seed):
    rng = random.Random(seed)
    near = [0, 1, B - 1, B, B + 1, 3 * B, 100]
    return [(rng.choice(near), rng.choice([1, 1, 2, B, 2 * B + 1])) for _ in range(9)]


@pytest.mark.parametrize("window", [0, 1, 5, B, B + 1, 60, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_the_block_lists_contain_exactly_the_visible_blocks(seed, window):
    runs = sorted(random_runs(seed), key=lambda run: run[1] != 1)
    batch = make_batch(runs)
    layout = StepLayout(batch, B, window)
    parts = layout.parts()
    assert [part.is_decode for part in parts] == sorted((p.is_decode for p in parts), reverse=True)
    assert [row for part in parts for row in range(9)[part.rows]] == list(range(9))
    for part in parts:
        lists, own = layout.page_lists(part), runs[part.rows]
        ends = lists.page_indptr_R1.tolist()
        assert lists.query_indptr_R1.tolist() == [
            sum(part.query_lens[:i]) for i in range(len(ends))
        ]
        assert ends[-1] == len(lists.pages_N) and lists.pages_N.dtype == torch.int32
        for i, run in enumerate(own):
            expected = seen_blocks(run, part.rows.start + i, batch.block_table_RM, window)
            assert lists.pages_N[ends[i] : ends[i + 1]].tolist() == expected
            length = (len(expected) - 1) * B + int(lists.last_page_len_R[i])
            assert length == part.key_lens[i]
            assert length % B == sum(run) % B and (window or length == sum(run))


@pytest.mark.parametrize("window", [0, 1, 5, B, B + 1, 60, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_the_block_tables_start_with_the_visible_blocks(seed, window):
    runs = random_runs(seed)
    batch = make_batch(runs, extra=0)
    tables = StepLayout(batch, B, window).page_tables()
    assert tables.table_RM.is_contiguous() and tables.table_RM.dtype == torch.int32
    assert tables.key_start_R1.dtype == tables.key_lens_R.dtype == torch.int32
    assert tables.key_start_R1.tolist() == [0, *tables.key_lens_R.cumsum(0).tolist()]
    for row, run in enumerate(runs):
        expected = seen_blocks(run, row, batch.block_table_RM, window)
        assert tables.table_RM[row, : len(expected)].tolist() == expected
        assert -(-int(tables.key_lens_R[row]) // B) == len(expected)
        assert int(tables.key_lens_R[row]) % B == sum(run) % B


def test_a_strided_block_table_is_supported():
    batch = make_batch([(20, 1), (3, 4)])
    wide = torch.zeros(2, 99, dtype=torch.int32)
    wide[:, : batch.block_table_RM.shape[1]] = batch.block_table_RM
    strided = AttentionBatch(
        **{name: getattr(batch, name) for name in AttentionBatch.__slots__}
        | {"block_table_RM": wide[:, :4]}
    )
    for other in (batch, strided):
        layout = StepLayout(other, B, 0)
        assert layout.page_lists(layout.parts()[0]).pages_N.tolist() == [1, 2]
        assert layout.page_tables().table_RM.is_contiguous()


@pytest.mark.parametrize(
    ("query_lens", "parts"),
    [
        ([1, 1, 1], [(True, 0, 3)]),
        ([1, 1, 4], [(True, 0, 2), (False, 2, 3)]),
        ([1, 4, 1], [(True, 0, 1), (False, 1, 3)]),
        ([4, 1, 1], [(False, 0, 3)]),
    ],
)
def test_the_decodes_at_the_start_of_a_batch_form_a_separate_part(query_lens, parts):
    result = StepLayout(make_batch([(7, n) for n in query_lens]), B, 0).parts()
    assert [(x.is_decode, x.rows.start, x.rows.stop) for x in result] == parts
    for part in result:
        assert part.tokens.start == sum(query_lens[: part.rows.start])
        assert part.tokens.stop == sum(query_lens[: part.rows.stop])


def test_unused_slots_are_those_after_the_last_token():
    batch = make_batch([(B, 1), (3, 4), (0, B), (2 * B - 2, 1)])
    blocks_S, offsets_S = StepLayout(batch, B, 0).unused_slots()
    table = batch.block_table_RM.tolist()
    expected = [(table[0][1], at) for at in range(1, B)]
    expected += [(table[1][0], at) for at in range(7, B)]
    expected += [(table[3][1], B - 1)]
    assert list(zip(blocks_S.tolist(), offsets_S.tolist(), strict=True)) == expected
    assert StepLayout(make_batch([(0, B), (B, B)]), B, 0).unused_slots() is None


def test_requests_without_scheduled_tokens_are_removed():
    batch = make_batch([(3, 0), (5, 2), (9, 0), (B, 1), (2, 0)])
    result = without_empty_runs(batch)
    assert result.query_start_R1.tolist() == [0, 2, 3]
    assert result.seq_lens_R.tolist() == list(result.seq_lens) == [7, B + 1]
    assert list(result.query_lens) == [2, 1]
    assert torch.equal(result.block_table_RM, batch.block_table_RM[[1, 3]])
    assert without_empty_runs(result) is result
