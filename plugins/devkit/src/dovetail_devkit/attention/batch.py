"""Checks every field of an `AttentionBatch` against the contract.

It detects that a worker creates a wrong batch, even if the tokens are still correct. This module
does not import torch.
"""

from __future__ import annotations

from dovetail.interfaces.attention import AttentionBatch
from dovetail_devkit.expectation import expect


def check_batch(
    batch: AttentionBatch, block_size: int, sliding_window: int = 0, threshold: int = 0
) -> None:
    """Raise AssertionError with the first field of `batch` that violates the contract.

    sliding_window: size of the KV-cache group's window, 0 for none; table entries before the window
    are not checked. threshold: the builder's `reorder_threshold`.
    """
    _check_types(batch)
    longer = [count > threshold for count in batch.query_lens]
    expect(
        not threshold or longer == sorted(longer),
        f"query_lens is {list(batch.query_lens)}; runs of at most {threshold} tokens must precede "
        "all longer runs, because the builder declares this reorder_threshold",
    )
    counts, lengths = list(batch.query_lens), list(batch.seq_lens)
    starts = [sum(counts[:run]) for run in range(len(counts) + 1)]
    actual = batch.query_start_R1.tolist()
    expect(
        actual == starts, f"query_start_R1 is {actual}, but query_lens {counts} require {starts}"
    )
    actual = batch.seq_lens_R.tolist()
    expect(actual == lengths, f"seq_lens_R is {actual} on the device, but {lengths} on the host")
    fits = all(0 < count <= length for count, length in zip(counts, lengths, strict=True))
    expect(
        fits,
        f"query_lens is {counts}; each entry must be at least 1 and at most the run's entry of "
        f"seq_lens, {lengths}",
    )
    table, slots = batch.block_table_RM.tolist(), batch.slot_mapping_T.tolist()
    expect(
        len(table) == len(counts),
        f"the batch has {len(table)} block tables, but {len(counts)} runs",
    )
    for run, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        num_blocks = -(-length // block_size)
        blocks = table[run]
        expect(
            len(blocks) >= num_blocks,
            f"run {run}: its {len(blocks)} blocks are too few for {length} tokens",
        )
        due = [
            blocks[position // block_size] * block_size + position % block_size
            for position in range(length - count, length)
        ]
        actual = slots[starts[run] : starts[run + 1]]
        expect(actual == due, f"run {run}: its tokens have the slots {actual}; expected {due}")
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
        actual = str(getattr(batch, name).dtype).removeprefix("torch.")
        expect(actual == due, f"{name} is {actual}; expected {due}")
    expect(
        len(batch.slot_mapping_T) == sum(batch.query_lens),
        "slot_mapping_T must have one entry per token",
    )


def _check_blocks(run: int, blocks: list[int], num_blocks: int) -> None:
    """Check that a table contains no block twice, and that zeros only follow the request's blocks.

    blocks: the table from the first visible block on. The first `num_blocks` entries hold tokens;
    additional blocks may be allocated in advance.
    """
    tail = blocks[num_blocks:]
    held = next((index for index, block in enumerate(tail) if not block), len(tail))
    expect(
        not any(tail[held:]),
        f"run {run}: its block table is {blocks}; the entries after its blocks must be 0",
    )
    own = [block for block in blocks if block]
    expect(
        len(set(own)) == len(own), f"run {run}: its block table contains a block twice: {blocks}"
    )
