"""Splits the outputs of one step into chunks, each processed in a fraction of a millisecond.

An event loop can run other tasks between the chunks, for any number of requests and
log-probabilities in a step. The work is counted, not measured. This module does not depend on text.
"""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.interfaces.scheduler import EngineCoreOutputs, Finished
from dovetail.result import LogprobColumns, PooledTensor

ENDING_WORK = 16
"""The work to end a request, counted in tokens: its whole text may have to be detokenized."""

LOGPROBS_PER_TOKEN = 16
"""Number of log-probabilities that count as one token of work, because they are only copied."""


VALUES_PER_TOKEN = 4096
"""Number of values of a pooled result that count as one token of work, because they are copied."""


def work_of(outputs: EngineCoreOutputs) -> int:
    """Return the amount of work needed to process the outputs, counted as in `cut_outputs`."""
    work = len(outputs.token_ids) + ENDING_WORK * len(outputs.finished)
    work += len(outputs.num_cached_tokens)
    work += sum(_work_of_pooled(pooled) for pooled in outputs.pooled.values())
    for columns_by_id in (outputs.logprobs, outputs.prompt_logprobs):
        if columns_by_id:
            work += sum(map(_work_of_logprobs, columns_by_id.values()))
    return work


def _work_of_pooled(pooled: PooledTensor) -> int:
    return 1 + len(pooled.values) // VALUES_PER_TOKEN


def _work_of_logprobs(columns: LogprobColumns) -> int:
    return len(columns.counts) + len(columns.token_ids) // LOGPROBS_PER_TOKEN


def cut_outputs(outputs: EngineCoreOutputs, maximum: int) -> Iterator[EngineCoreOutputs]:
    """Yield chunks that together have the content of `outputs`, in order.

    maximum: maximum work of a chunk, counted in tokens and log-probabilities; the new tokens of one
    request are not split. Small outputs are yielded unchanged; otherwise the statistics are
    omitted.
    """
    if work_of(outputs) <= maximum:
        yield outputs
        return
    cached = list(outputs.num_cached_tokens.items())
    for first in range(0, len(cached), max(1, maximum)):
        part = dict(cached[first : first + max(1, maximum)])
        times = {name: outputs.admitted_ns[name] for name in part if name in outputs.admitted_ns}
        yield EngineCoreOutputs(num_cached_tokens=part, admitted_ns=times)
    for core_id, columns in outputs.prompt_logprobs.items():
        for piece in cut_logprobs(columns, maximum):
            yield EngineCoreOutputs(prompt_logprobs={core_id: piece})
    for core_id, pooled in outputs.pooled.items():
        yield EngineCoreOutputs(pooled={core_id: pooled})
    yield from _cut_rows(outputs, maximum)
    served = set(outputs.request_ids)
    bare = [ending for ending in outputs.finished if ending.request_id not in served]
    size = max(1, maximum // ENDING_WORK)
    for first in range(0, len(bare), size):
        yield EngineCoreOutputs(finished=tuple(bare[first : first + size]))


def cut_logprobs(columns: LogprobColumns, maximum: int) -> Iterator[LogprobColumns]:
    """Yield the positions in order, in chunks with at most `maximum` work or with one position."""
    first = start = end = 0
    for position, count in enumerate(columns.counts):
        work = position + 1 - first + (end + count - start) // LOGPROBS_PER_TOKEN
        if position > first and work > maximum:
            yield _slice(columns, first, position, start, end)
            first, start = position, end
        end += count
    if first < len(columns.counts):
        yield _slice(columns, first, len(columns.counts), start, end)


def _cut_rows(outputs: EngineCoreOutputs, maximum: int) -> Iterator[EngineCoreOutputs]:
    """Yield chunks of the requests with new tokens, each with its end if it has ended."""
    endings = {ending.request_id: ending for ending in outputs.finished}
    first = start = end = work = 0
    for index, core_id in enumerate(outputs.request_ids):
        count = outputs.num_new_tokens[index]
        here = count + ENDING_WORK * (core_id in endings)
        if core_id in outputs.logprobs:
            here += _work_of_logprobs(outputs.logprobs[core_id])
        if index > first and work + here > maximum:
            yield _rows(outputs, slice(first, index), slice(start, end), endings)
            first, start, work = index, end, 0
        work += here
        end += count
    if first < len(outputs.request_ids):
        rows = slice(first, len(outputs.request_ids))
        yield _rows(outputs, rows, slice(start, end), endings)


def _rows(
    outputs: EngineCoreOutputs, rows: slice, tokens: slice, endings: dict[str, Finished]
) -> EngineCoreOutputs:
    ids = outputs.request_ids[rows]
    return EngineCoreOutputs(
        request_ids=ids,
        num_new_tokens=outputs.num_new_tokens[rows],
        token_ids=outputs.token_ids[tokens],
        finished=tuple(endings[core_id] for core_id in ids if core_id in endings),
        logprobs={name: outputs.logprobs[name] for name in ids if name in outputs.logprobs},
    )


def _slice(columns: LogprobColumns, first: int, last: int, start: int, end: int) -> LogprobColumns:
    return LogprobColumns(
        counts=columns.counts[first:last],
        token_ids=columns.token_ids[start:end],
        logprobs=columns.logprobs[start:end],
        ranks=columns.ranks[first:last],
    )
