"""The tensors of a step: blocks and lengths with a window, slots, and refreshing for a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.interfaces.attention import AttentionBatch
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flash_attn.layout import KeptTensors, StepLayout, first_block

B = 4
SPEC = FullAttentionSpec(block_size=B, num_kv_heads=1, head_size=64, dtype="bfloat16")
RUNS = ((0, 5), (7, 1), (12, 1), (9, 4))
"""Numbers of context tokens and query tokens of each row. Row r has the blocks 10 · r + 1, 10 · r +
2, …"""


def batch_of(runs=RUNS):
    lens = [sum(run) for run in runs]
    width = max(-(-length // B) for length in lens) + 1
    table = torch.zeros(len(runs), width, dtype=torch.int32)
    slots = []
    for row, (context, count) in enumerate(runs):
        num_blocks = -(-lens[row] // B)
        table[row, :num_blocks] = 10 * row + 1 + torch.arange(num_blocks)
        at = torch.arange(context, context + count)
        slots.append(table[row, at // B].long() * B + at % B)
    query_lens = [count for _, count in runs]
    return AttentionBatch(
        query_start_R1=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens_R=torch.tensor(lens, dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=torch.cat(slots),
        query_lens=query_lens,
        seq_lens=lens,
    )


def with_window(window):
    return replace(SPEC, sliding_window=window)


def test_without_a_sliding_window_the_block_tables_of_the_batch_are_used():
    batch = batch_of()
    step = StepLayout(SPEC, batch)
    assert torch.equal(step.table_RM, batch.block_table_RM[:, :4])
    assert step.key_lens_R is batch.seq_lens_R
    assert (step.max_key_len, step.max_query_len, step.num_rows) == (16, 5, 4)
    assert step.cu_key_lens_R1.tolist() == [0, 5, 13, 26, 39]
    assert step.cu_key_lens_R1.dtype == torch.int32


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 100])
def test_the_listed_blocks_are_visible_to_the_first_query(window):
    batch = batch_of()
    step = StepLayout(with_window(window), batch)
    table, lens = step.table_RM, step.key_lens_R
    assert table.dtype == lens.dtype == torch.int32
    for row, (context, count) in enumerate(RUNS):
        first_seen = max(0, context + 1 - window)
        expected = [
            10 * row + 1 + block for block in range(first_seen // B, -(-(context + count) // B))
        ]
        assert table[row, : len(expected)].tolist() == expected
        assert lens[row] == context + count - first_seen // B * B
        assert -(-int(lens[row]) // B) == len(expected)
    assert step.max_key_len == B * max(-(-length // B) for length in lens.tolist())
    assert step.max_key_len == B * table.shape[1]


def test_the_first_block_contains_the_oldest_visible_position():
    assert [first_block(context, B, 0) for context in (0, 50)] == [0, 0]
    assert [first_block(context, B, 3) for context in (0, 2, 5, 6, 7)] == [0, 0, 0, 1, 1]


def test_slots_are_computed_from_blocks_and_offsets():
    batch = batch_of()
    blocks, offsets = StepLayout(SPEC, batch).slots()
    assert torch.equal(blocks * B + offsets, batch.slot_mapping_T)


@pytest.mark.parametrize("window", [0, 3])
def test_unused_slots_are_after_the_last_token_of_each_request(window):
    blocks, offsets = StepLayout(with_window(window), batch_of()).unused_slots()
    assert len(blocks) == len(offsets) == len(RUNS) * B  # independent of the lengths
    unused = {pair for pair in zip(blocks.tolist(), offsets.tolist(), strict=True) if pair[0]}
    expected = {(2, slot) for slot in (1, 2, 3)}  # row 0 has 5 tokens; row 1 has 8
    expected |= {(24, slot) for slot in (1, 2, 3)} | {(34, slot) for slot in (1, 2, 3)}
    assert unused == expected


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5])
def test_the_block_table_of_a_graph_has_room_for_the_longest_requests(window):
    for length in range(1, 40):
        context = ((length - 1, 1), (0, 1))
        eager = StepLayout(with_window(window), batch_of(context))
        graph = StepLayout(with_window(window), batch_of(((39, 1), (0, 1))), num_splits=4)
        assert eager.max_key_len <= graph.max_key_len
        assert graph.max_query_len == 1 and graph.num_splits == 4
        if window:
            assert graph.max_key_len <= window + 2 * B


def test_refreshed_step_tensors_keep_their_addresses_and_get_the_new_values():
    first, second = batch_of(((20, 1), (6, 1))), batch_of(((23, 1), (4, 1)))
    graph = StepLayout(with_window(3), first, num_splits=2)

    def tensors():
        return [graph.cu_key_lens_R1, graph.table_RM, graph.key_lens_R, *graph.slots()]

    addresses = [tensor.data_ptr() for tensor in tensors()]
    for name in ("seq_lens_R", "block_table_RM", "slot_mapping_T"):
        getattr(first, name).copy_(getattr(second, name))
    graph.refresh(replace(first, seq_lens=second.seq_lens))
    assert [tensor.data_ptr() for tensor in tensors()] == addresses
    fresh = StepLayout(with_window(3), second)
    assert torch.equal(graph.table_RM[:, : fresh.table_RM.shape[1]], fresh.table_RM)
    assert torch.equal(graph.key_lens_R, fresh.key_lens_R)
    assert torch.equal(graph.cu_key_lens_R1, fresh.cu_key_lens_R1)
    assert all(map(torch.equal, graph.slots(), fresh.slots()))


def test_step_tensors_are_computed_once():
    counts = []
    kept = KeptTensors(for_graph=False)
    for _ in range(2):
        kept.get("x", lambda: counts.append(1) or torch.zeros(1))
    assert counts == [1]
