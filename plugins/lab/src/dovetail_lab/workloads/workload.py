"""The requests of an experiment: when each arrives, how long it is, and what it may share.

A workload is created once and used for every policy, so that random numbers cause no differences
between policies. Times are integers in nanoseconds from the start of the
workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HASH_BLOCK_TOKENS = 512
"""Number of tokens per entry of `WorkloadRequest.prefix_hashes`, as in Mooncake's traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request of a workload.

    request_id: unique in the workload.
    arrival_ns: time of arrival. With `parent`, the request arrives at
        max(arrival_ns, end of the parent + think_ns) instead.
    num_prompt_tokens, num_output_tokens: lengths in tokens, each at least 1. Policies never see
        num_output_tokens; the request stops after this many tokens.
    max_tokens: the limit that the client sends; policies see it. At least num_output_tokens.
    tenant, priority: as in `EngineCoreRequest`.
    session: the conversation to which the request belongs; "" for none.
    parent: id of the request that must end before this one arrives; "" for none. It precedes this
        request in the workload.
    prefix_hashes: identities of the prompt's blocks of `HASH_BLOCK_TOKENS` tokens, chained: equal
        first n entries mean equal first n blocks. Empty: the prompt is unique, except that it
        begins with prompt and output of `parent`, if there is one.
    slo_class: name of the request's class in reports; "" for none.
    expected_tokens: the client's estimate of the output length, which policies see as
        `SamplingParams.extra_args["expected_tokens"]`; 0 for none.
    ttft_slo_ns, tpot_slo_ns: objectives for the time to the first token and per further token; 0
        for none. The first one is also the request's deadline.
    """

    request_id: str
    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    tenant: str = ""
    priority: int = 0
    session: str = ""
    parent: str = ""
    think_ns: int = 0
    prefix_hashes: tuple[int, ...] = ()
    slo_class: str = ""
    expected_tokens: int = 0
    ttft_slo_ns: int = 0
    tpot_slo_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests in the order of `arrival_ns`.

    name: for reports, such as "azure:conv". fingerprint: SHA-256 of everything that determines the
    requests (source file, parameters, seed), in hexadecimal.
    """

    name: str
    requests: Sequence[WorkloadRequest]
    fingerprint: str
