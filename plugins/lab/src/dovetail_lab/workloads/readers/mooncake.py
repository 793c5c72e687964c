"""Reads the traces of Mooncake (FAST 2025).

Format: JSON Lines with timestamp (milliseconds), input_length, output_length and hash_ids: one
number per block of 512 prompt tokens, equal for equal prefixes. Source: the project
kvcache-ai/Mooncake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dovetail_lab.workloads.readers.lines import read_objects
from dovetail_lab.workloads.readers.trace_row import RowChecker, TraceRow
from dovetail_lab.workloads.workload import HASH_BLOCK_TOKENS

FIELDS = ("timestamp", "input_length", "output_length")
_MS = 1_000_000


def read_mooncake(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a trace; raise TraceError for an invalid or unsorted row."""
    checker = RowChecker(str(path))
    return checker.in_order(_rows(path, checker))


def _rows(path: Path, checker: RowChecker) -> Iterator[TraceRow]:
    for line, fields in read_objects(path):
        missing = [name for name in FIELDS if name not in fields]
        if missing:
            checker.fail(line, f"the object has no field {missing[0]!r}.")
        num_prompt = checker.count(line, "input_length", fields["input_length"])
        yield TraceRow(
            line=line,
            arrival_ns=checker.time_ns(line, "timestamp", fields["timestamp"], unit_ns=_MS),
            num_prompt_tokens=num_prompt,
            num_output_tokens=checker.count(line, "output_length", fields["output_length"]),
            prefix_hashes=_hashes(checker, line, fields.get("hash_ids", []), num_prompt),
        )


def _hashes(checker: RowChecker, line: int, ids: object, num_prompt: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(item) is not int for item in ids):
        checker.fail(line, "hash_ids is not a list of integers.")
    num_blocks = -(-num_prompt // HASH_BLOCK_TOKENS)
    if ids and len(ids) != num_blocks:
        checker.fail(
            line,
            f"hash_ids has {len(ids)} entries; input_length={num_prompt} needs {num_blocks} blocks "
            f"of {HASH_BLOCK_TOKENS} tokens.",
        )
    return tuple(ids)
