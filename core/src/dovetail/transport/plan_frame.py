"""Encodes plans as frames, and decodes them.

The columns of a `SchedulerOutput` are sent unchanged; objects (mainly new requests) are msgpack in
one more column, which is empty in most steps. Decoding checks everything that a worker relies on
for memory safety: lengths, signs, and consistent counts. The worker checks whether a batch slot or
a block exists.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from dovetail.errors import MessageError
from dovetail.plan import BlockColumns, EncoderRun, SchedulerOutput
from dovetail.transport.columns import (
    MAX_COLUMNS,
    check_lengths,
    counts32,
    flags8,
    pack_columns,
    unpack_columns,
)
from dovetail.transport.wire_types import WirePlanTail, decode, encode, read_join, wire_join

PLAN = 1
_NUM_FIXED = 9
MAX_GROUPS = (MAX_COLUMNS - _NUM_FIXED) // 3


def encode_plan(plan: SchedulerOutput) -> bytes:
    """Return the frame of a plan. Raises ValueError for more than MAX_GROUPS KV-cache groups."""
    tail = b""
    if plan.joins or plan.encoder_frees or plan.kv_transfer:
        joins = tuple(wire_join(join) for join in plan.joins)
        tail = encode(WirePlanTail(joins, plan.encoder_frees, plan.kv_transfer))
    columns: list[bytes | array[int]] = [
        plan.rows,
        plan.starts,
        plan.num_tokens,
        plan.samples,
        plan.leaves,
        plan.num_drafts,
        array("i", [run.row for run in plan.encoder]),
        array("i", [run.index for run in plan.encoder]),
        tail,
    ]
    for blocks in plan.blocks:
        columns += (blocks.rows, blocks.counts, blocks.block_ids)
    return pack_columns(PLAN, columns, (plan.step_id, plan.total_num_tokens))


def decode_plan(frame: bytes) -> SchedulerOutput:
    """Decode a plan and copy its columns. Raises MessageError if the frame is not valid."""
    columns = unpack_columns(frame, PLAN, minimum=_NUM_FIXED)
    step_id, total = columns.numbers
    rows, starts, num_tokens, samples, leaves, num_drafts, content_rows, indexes, tail = (
        columns.columns[:_NUM_FIXED]
    )
    plan = SchedulerOutput(
        step_id=step_id,
        rows=counts32(rows, "rows"),
        starts=counts32(starts, "starts"),
        num_tokens=counts32(num_tokens, "num_tokens"),
        samples=flags8(samples, "samples"),
        joins=(),
        leaves=counts32(leaves, "leaves"),
        blocks=_blocks(columns.columns[_NUM_FIXED:]),
        total_num_tokens=total,
        num_drafts=counts32(num_drafts, "num_drafts"),
        encoder=_encoder(content_rows, indexes),
    )
    _check_runs(plan)
    return plan if not tail else _with_tail(plan, decode(tail, WirePlanTail))


def _check_runs(plan: SchedulerOutput) -> None:
    num_runs = len(plan.rows)
    if not num_runs == len(plan.starts) == len(plan.num_tokens) == len(plan.samples):
        check_lengths(
            num_runs, starts=plan.starts, num_tokens=plan.num_tokens, samples=plan.samples
        )
    if plan.num_drafts:
        check_lengths(num_runs, num_drafts=plan.num_drafts)
    if plan.step_id < 0 or sum(plan.num_tokens) != plan.total_num_tokens or 0 in plan.num_tokens:
        raise MessageError(
            f"plan {plan.step_id} declares {plan.total_num_tokens} tokens, but its requests "
            f"have {sum(plan.num_tokens)}; each request needs at least one token."
        )


def _blocks(columns: list[memoryview]) -> tuple[BlockColumns, ...]:
    if len(columns) % 3:
        raise MessageError(
            f"a plan has {len(columns)} block columns; each KV-cache group needs three."
        )
    groups = []
    for index in range(0, len(columns), 3):
        rows, counts, ids = (counts32(column, "blocks") for column in columns[index : index + 3])
        check_lengths(len(rows), counts=counts)
        check_lengths(sum(counts), block_ids=ids)
        groups.append(BlockColumns(rows=rows, counts=counts, block_ids=ids))
    return tuple(groups)


def _encoder(rows: memoryview, indexes: memoryview) -> tuple[EncoderRun, ...]:
    if not rows and not indexes:
        return ()
    row_numbers, positions = counts32(rows, "encoder rows"), counts32(indexes, "encoder indexes")
    check_lengths(len(row_numbers), encoder_indexes=positions)
    pairs = zip(row_numbers, positions, strict=True)
    return tuple(EncoderRun(row=row, index=index) for row, index in pairs)


def _with_tail(plan: SchedulerOutput, tail: WirePlanTail) -> SchedulerOutput:
    return replace(
        plan,
        joins=tuple(map(read_join, tail.joins)),
        encoder_frees=tail.encoder_frees,
        kv_transfer=tail.kv_transfer,
    )
