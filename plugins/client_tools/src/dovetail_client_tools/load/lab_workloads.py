"""Workloads and traces of the scheduler lab as requests of a load test.

The lab is imported only when a workload names it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError
from dovetail_client_tools.load.load_request import LoadRequest

if TYPE_CHECKING:
    from dovetail_lab.workloads.spec import WorkloadSpec

MAX_LENGTH = 1 << 24


def read_spec(name: str, count: int, arrivals: str, burstiness: float) -> WorkloadSpec:
    """Return the lab's description of a workload. Raise ConfigError if it cannot be used.

    name: a synthetic workload such as "chat" or "conversations", or a trace such as "azure:conv" or
    the path of a file. arrivals: "poisson", "gamma", "constant", "burst", or "" for those of the
    workload.
    """
    from dovetail_lab.experiments.spec import workload_fields
    from dovetail_lab.workloads.presets import PRESETS
    from dovetail_lab.workloads.spec import ArrivalSpec, WorkloadSpec

    if name not in PRESETS and ":" not in name and not os.path.exists(name):
        raise ConfigError(
            f"--workload {name} is neither a file nor a trace such as azure:conv nor one of fixed, "
            f"{', '.join(PRESETS)}."
        )
    fields = {**workload_fields(name), "num_requests": count}
    if arrivals == "constant":
        raise ConfigError(
            "--arrivals constant is supported only with --workload fixed. Use poisson, gamma "
            "or burst."
        )
    if arrivals:
        fields["arrivals"] = ArrivalSpec.model_validate(
            {"process": arrivals, "burstiness": burstiness}
        )
    try:
        return WorkloadSpec(**fields)
    except ValueError as error:
        raise ConfigError(f"--workload {name}: {_first_line(error)}") from None


def lab_requests(
    spec: WorkloadSpec, *, rate: float, seed: int, max_model_len: int
) -> list[LoadRequest]:
    """Return the requests of a workload; their lengths do not depend on the rate.

    max_model_len: maximum number of tokens of a request; longer ones are shortened. Raises
    UserError if the trace cannot be read.
    """
    from dovetail_lab.workloads.building import build_workload
    from dovetail_lab.workloads.workload import HASH_BLOCK_TOKENS

    built = build_workload(
        spec, rate=rate, seed=seed, num_seeds=seed + 1, max_model_len=max_model_len or MAX_LENGTH
    )
    requests = built.workload.requests
    numbers = {request.request_id: number for number, request in enumerate(requests)}
    return [
        LoadRequest(
            number=number,
            arrival_ns=request.arrival_ns,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            parent=numbers[request.parent] if request.parent else -1,
            think_ns=request.think_ns,
            prefix=request.prefix_hashes,
            block_tokens=HASH_BLOCK_TOKENS,
            tenant=request.tenant,
            priority=request.priority,
        )
        for number, request in enumerate(requests)
    ]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else "The workload is invalid."
