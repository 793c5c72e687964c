"""Checks every field of an `AttentionBatch` against the contract.

It detects a worker's wrong batch before a wrong slot becomes a wrong token. This module does not
import torch.
"""

from __future__ import annotations

from dovetail.interfaces.attention import AttentionBatch
from dovetail_devkit.expectation import expect


def check_batch(batch: AttentionBatch, block_size: int, sliding_window: int = 0) -> None:
    """Raise AssertionError with the first field of `batch` that violates the contract.

    sliding_window: the group's, 0 for none; table entries before the window are not checked.
    """
    _check_types(batch)
    counts, lengths = list(batch.query_lens), list(batch.seq_lens)
    starts = [sum(counts[:run]) for run in range(len(counts) + 1)]
    got = batch.query_start_R1.tolist()
    expect(got == starts, f"query_start_R1 is {got}; query_lens {counts} give {starts}")
    got = batch.seq_lens_R.tolist()
    expect(got == lengths, f"seq_lens_R is {got} on the device and {lengths} on the host")
    fits = all(0 < count <= length for count, length in zip(counts, lengths, strict=True))
    expect(fits, f"query_lens {counts} do not fit seq_lens {lengths}")
    table, slots = batch.block_table_RM.tolist(), batch.slot_mapping_T.tolist()
    expect(len(table) == len(counts), f"{len(table)} block tables for {len(counts)} runs")
    for run, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        num_blocks = -(-length // block_size)
        blocks = table[run]
        expect(len(blocks) >= num_blocks, f"run {run}: {len(blocks)} blocks for {length} tokens")
        due = [
            blocks[position // block_size] * block_size + position % block_size
            for position in range(length - count, length)
        ]
        got = slots[starts[run] : starts[run + 1]]
        expect(got == due, f"run {run}: its tokens go to slots {got}; its blocks give {due}")
        first_seen = max(0, length - count - sliding_window + 1) if sliding_window else 0
        first = first_seen // block_size
        _check_blocks(run, blocks[first:], num_blocks - first)


def _check_types(batch: AttentionBatch) -> None:
    dtypes = {
        "query_start_R1": "int32",
        "seq_lens_R": "int32",
        "block_table_RM": "int32",
        "slot_mapping_T": "int64",
    }
    for name, due in dtypes.items():
        got = str(getattr(batch, name).dtype).removeprefix("torch.")
        expect(got == due, f"{name} is {got}; expected {due}")
    expect(
        len(batch.slot_mapping_T) == sum(batch.query_lens),
        "slot_mapping_T must have one entry per token",
    )


def _check_blocks(run: int, blocks: list[int], num_blocks: int) -> None:
    """Check that a row's blocks precede the zeros; some may be allocated before their tokens.

    blocks: from the first visible block; the first `num_blocks` of them hold tokens.
    """
    tail = blocks[num_blocks:]
    held = next((place for place, block in enumerate(tail) if not block), len(tail))
    expect(
        not any(tail[held:]),
        f"run {run}: its block table is {blocks}; entries after a row's blocks must be 0",
    )
    own = [block for block in blocks if block]
    expect(len(set(own)) == len(own), f"run {run}: a block appears twice in its table {blocks}")
