"""How the kernels of recurrent operations split the tokens of a step.

A request with one token is a single. The tokens of other requests are split into chunks, which
never contain the end of a part. The host knows the boundaries. If all requests are singles, as
in a step of decodes and in a captured graph, the kernels need no list. Otherwise all lists are sent
to the device in one copy, without a wait; the layers of a step share the copy. Dimensions: N parts,
S singles, R requests that are not singles, C chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from dovetail.interfaces.ops import StateParts

CHUNK_SIZE = 16
"""Maximum number of tokens of a chunk."""

_PLANS = 8
"""Number of plans that are kept: the steps that may be submitted at the same time, and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """The singles, requests and chunks of a step. The lists are int32, on the device.

    singles_S2: (token, part); None if all requests are singles, so that both are the index.
    runs_R4: (first part, end of the parts, first chunk, first token). ends_N: end of the tokens of
    each part. chunks_C4: (first token, number of tokens, first token of the request, first part of
    the request).
    """

    num_singles: int
    num_runs: int = 0
    num_chunks: int = 0
    singles_S2: torch.Tensor | None = None
    runs_R4: torch.Tensor | None = None
    ends_N: torch.Tensor | None = None
    chunks_C4: torch.Tensor | None = None


def plan_states(parts: StateParts, device: torch.device) -> StatePlan:
    """Return the plan of a step. Does not wait for the device."""
    if len(parts.sizes) == len(parts.num_parts) and max(parts.sizes, default=1) == 1:
        return StatePlan(num_singles=len(parts.sizes))
    return _plan(parts.sizes, parts.num_parts, device)


@lru_cache(maxsize=_PLANS)
def _plan(sizes: tuple[int, ...], num_parts: tuple[int, ...], device: torch.device) -> StatePlan:
    singles: list[int] = []
    runs: list[int] = []
    chunks: list[int] = []
    ends = list(accumulate(sizes))
    part = token = 0
    for count in num_parts:
        own = sizes[part : part + count]
        if own == (1,):
            singles += (token, part)
        else:
            runs += (part, part + count, len(chunks) // 4, token)
            chunks += _chunks(own, token, part)
        part += count
        token += sum(own)
    lists = (singles, runs, ends, chunks)
    numbers = torch.tensor([x for each in lists for x in each], dtype=torch.int32)
    copied = _to_device(numbers, device).split([len(each) for each in lists])
    return StatePlan(
        num_singles=len(singles) // 2,
        num_runs=len(runs) // 4,
        num_chunks=len(chunks) // 4,
        singles_S2=copied[0],
        runs_R4=copied[1],
        ends_N=copied[2],
        chunks_C4=copied[3],
    )


def _chunks(sizes: tuple[int, ...], first_token: int, first_part: int) -> Iterator[int]:
    """Yield the rows of `chunks_C4`, flattened, for a request with parts of these sizes."""
    token = first_token
    for size in sizes:
        for start in range(0, size, CHUNK_SIZE):
            yield from (token + start, min(CHUNK_SIZE, size - start), first_token, first_part)
        token += size


def _to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers to the device from pinned memory, so that the host does not wait."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)
