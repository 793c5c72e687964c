"""A request before its arrival time, id, class and limits are known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class DraftRequest:
    """The properties that a trace or a synthetic workload determines.

    arrival_ns: time in the trace; 0 for synthetic requests. parent: index of the request that must
    end before; -1 for none. The other fields are those of `WorkloadRequest`.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    arrival_ns: int = 0
    tenant: str = ""
    priority: int = 0
    session: str = ""
    parent: int = -1
    think_ns: int = 0
    max_tokens: int = 0
    prefix_hashes: tuple[int, ...] = ()
