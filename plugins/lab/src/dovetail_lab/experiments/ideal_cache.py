"""Computes the prefix hits of an infinite cache, an upper bound of a workload's hit rate."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail_lab.workloads.workload import HASH_BLOCK_TOKENS, WorkloadRequest


def ideal_hits(requests: Sequence[WorkloadRequest], block_size: int) -> list[int]:
    """Return, for each request, the number of prompt tokens that it shares with earlier requests.

    Counts whole blocks of `block_size` tokens, and never the last token of a prompt, because its
    output must be computed.
    """
    seen: set[int] = set()
    lengths: dict[str, int] = {}
    hits = []
    for request in requests:
        shared = lengths.get(request.parent, 0) if not request.prefix_hashes else 0
        for hash_ in request.prefix_hashes:
            if hash_ not in seen:
                break
            shared += HASH_BLOCK_TOKENS
        seen.update(request.prefix_hashes)
        lengths[request.request_id] = request.num_prompt_tokens + request.num_output_tokens
        shared = min(shared, request.num_prompt_tokens - 1)
        hits.append(shared // block_size * block_size)
    return hits
