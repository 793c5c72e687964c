"""The conformance cases of `prepare_inputs`, for providers that override it.

All inputs of a step are compared with the results of Python loops. As in a model runner, outputs
are prefixes of longer buffers, or parts of one common buffer. torch is imported within functions.

Dimensions: R scheduled requests, T tokens, L tokens of the longest request, M blocks per row of the
block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.ops import Ops, StepColumns, overridden_operations
from dovetail_devkit.case import Case
from dovetail_devkit.expectation import expect

if TYPE_CHECKING:
    import torch

_NUM_ROWS = 7
_LENGTH = 1500
_UNTOUCHED = -77
_MARGIN = 5
_PACKET_PLACE = 4
"""The inputs in the common buffer start at multiples of this many int32 numbers (16 bytes)."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A step. runs: (row, start, number of tokens) of each request.

    block_sizes: one per KV-cache group.
    """

    runs: tuple[tuple[int, int, int], ...]
    block_sizes: tuple[int, ...] = (16,)


SHAPES = {
    "one decode": StepShape(runs=((3, 40, 1),)),
    "decodes": StepShape(runs=((6, 0, 1), (0, 1499, 1), (4, 15, 1), (2, 16, 1))),
    "a prompt": StepShape(runs=((5, 0, 37),)),
    "chunks and decodes": StepShape(runs=((1, 100, 1), (4, 33, 700), (0, 7, 1), (2, 0, 18))),
    "two groups": StepShape(runs=((2, 30, 20), (6, 511, 2)), block_sizes=(16, 32)),
    "no cache": StepShape(runs=((2, 30, 3), (1, 5, 1)), block_sizes=()),
}


def input_cases(ops_cls: type[Ops], device: torch.device) -> Iterator[Case]:
    """Yield the cases, or nothing if the class does not override `prepare_inputs`."""
    if "prepare_inputs" not in overridden_operations(ops_cls):
        return
    for name, shape in SHAPES.items():
        yield Case(
            name=f"prepare_inputs, {name}", run=partial(_check_inputs, ops_cls, shape, device)
        )


def _check_inputs(ops_cls: type[Ops], shape: StepShape, device: torch.device) -> None:
    """Compare the outputs with those of Python loops, and check that nothing else was written."""
    import torch

    ops: Any = ops_cls()
    columns, buffers = make_columns(shape, device)
    tensors = [getattr(columns, name) for name in ("rows_R", "starts_R", "query_start_R1")]
    tensors += [columns.token_ids_RL, *columns.block_tables]
    copies = [tensor.clone() for tensor in tensors]
    ops.prepare_inputs(columns)
    for tensor, copy in zip(tensors, copies, strict=True):
        expect(torch.equal(tensor, copy), "prepare_inputs must not change its inputs")
    for what, actual, expected in _expected(shape, columns):
        expect(actual == expected, f"{what} is {actual!s:.300}; expected {expected!s:.300}")
    for buffer in buffers:
        tail = buffer[-_MARGIN:].tolist()
        expect(tail == [_UNTOUCHED] * _MARGIN, "prepare_inputs must not write after its outputs")


def make_columns(
    shape: StepShape, device: torch.device
) -> tuple[StepColumns, tuple[torch.Tensor, ...]]:
    """Return the columns of a step, and the buffers of its outputs, which are not written yet."""
    import torch

    generator = torch.Generator().manual_seed(11)
    rows, starts, counts = (list(column) for column in zip(*shape.runs, strict=True))
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    buffers: list[torch.Tensor] = []

    def given(numbers: list[int]) -> torch.Tensor:
        packet = torch.tensor([_UNTOUCHED] * _PACKET_PLACE + numbers, dtype=torch.int32)
        return packet.to(device)[_PACKET_PLACE:]

    def made(size: int, dtype: torch.dtype) -> torch.Tensor:
        buffers.append(torch.full((size + _MARGIN,), _UNTOUCHED, dtype=dtype, device=device))
        return buffers[-1][:size]

    def drawn(*size: int) -> torch.Tensor:
        numbers = torch.randint(1, 30_000, size, generator=generator, dtype=torch.int32)
        return numbers.to(device)

    widths = [-(-max(ends) // size) for size in shape.block_sizes]
    num_runs, num_tokens = len(rows), firsts[-1]
    columns = StepColumns(
        rows_R=given(rows),
        starts_R=given(starts),
        query_start_R1=given(firsts),
        token_ids_RL=drawn(_NUM_ROWS, _LENGTH),
        block_tables=tuple(drawn(_NUM_ROWS, -(-_LENGTH // size)) for size in shape.block_sizes),
        block_sizes=shape.block_sizes,
        input_ids_T=made(num_tokens, torch.int64),
        positions_T=made(num_tokens, torch.int64),
        seq_lens_R=made(num_runs, torch.int32),
        slots_T=tuple(made(num_tokens, torch.int64) for _ in shape.block_sizes),
        block_tables_RM=tuple(
            made(num_runs * width, torch.int32).view(num_runs, width) for width in widths
        ),
        num_tokens=num_tokens,
        longest=max(counts),
    )
    return columns, tuple(buffers)


def _expected(shape: StepShape, columns: StepColumns) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the output and the expected output."""
    token_ids = columns.token_ids_RL.tolist()
    tokens = [(row, start + i) for row, start, count in shape.runs for i in range(count)]
    yield "input_ids_T", columns.input_ids_T.tolist(), [token_ids[row][p] for row, p in tokens]
    yield "positions_T", columns.positions_T.tolist(), [p for _, p in tokens]
    ends = [start + count for _, start, count in shape.runs]
    yield "seq_lens_R", columns.seq_lens_R.tolist(), ends
    for g, size in enumerate(shape.block_sizes):
        table = columns.block_tables[g].tolist()
        slots = [table[row][p // size] * size + p % size for row, p in tokens]
        yield f"slots_T[{g}]", columns.slots_T[g].tolist(), slots
        output = columns.block_tables_RM[g]
        rows = [table[row][: output.shape[1]] for row, _, _ in shape.runs]
        yield f"block_tables_RM[{g}]", output.tolist(), rows
