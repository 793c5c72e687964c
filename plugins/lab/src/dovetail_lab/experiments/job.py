"""One job of a worker process: builds a workload, runs it, measures and stores the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail_lab.experiments.run_files import RunFolder, RunRecord
from dovetail_lab.experiments.run_key import CAPACITY_LOAD, RunKey
from dovetail_lab.experiments.run_metrics import measure_run
from dovetail_lab.experiments.spec import ExperimentSpec
from dovetail_lab.simulation.results import NEVER, RunResult
from dovetail_lab.workloads.building import BURST, BuiltWorkload, build_workload
from dovetail_lab.workloads.workload import Workload

NS = 1_000_000_000
CAPACITY_SHARE = 0.9
"""The capacity is the rate of completions until this share of a burst's requests has ended."""

Runner = Callable[..., RunResult]
"""Runs a workload; see `engines.run_workload`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to execute. folder: where to store its result.

    keep_steps: whether to store its steps.
    """

    run_id: str
    spec: ExperimentSpec
    key: RunKey
    folder: str
    keep_steps: bool
    trust_local_code: bool

    def plain(self) -> dict[str, Any]:
        """Return the job as plain data."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "spec": self.spec.model_dump(mode="json"),
            "key": self.key.plain(),
        }

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Job:
        """Return the job from the result of `plain`."""
        spec, key = ExperimentSpec.model_validate(fields["spec"]), RunKey(**fields["key"])
        return cls(**{**fields, "spec": spec, "key": key})


def built_workload(spec: ExperimentSpec, key: RunKey) -> BuiltWorkload:
    """Return the workload of a run. Runs that differ only in the policy get equal workloads."""
    return build_workload(
        spec.workload,
        rate=key.rate or BURST,
        seed=key.seed,
        num_seeds=spec.seeds,
        max_model_len=spec.setup.max_model_len,
    )


def do_job(job: Job, runner: Runner) -> RunRecord:
    """Run, measure and store a job. Any error results in a record with the status "failed"."""
    store, started = RunFolder(Path(job.folder)), time.monotonic()
    record = RunRecord(run_id=job.run_id, key=job.key, status="failed")
    try:
        built = built_workload(job.spec, job.key)
        result = runner(job.spec, job.key, built.workload, trust_local_code=job.trust_local_code)
        record = _measured(job, built, result)
        store.write_columns(job.run_id, result.requests, result.steps if job.keep_steps else None)
    except Exception as error:
        record = replace(record, error=f"{type(error).__name__}: {error}"[:2000])
    record = replace(record, host_s=time.monotonic() - started)
    store.write(record)
    return record


def _measured(job: Job, built: BuiltWorkload, result: RunResult) -> RunRecord:
    spec = job.spec
    metrics = measure_run(result, built.workload.requests, spec.cut, spec.setup.block_size)
    facts = {
        "num_steps": float(result.num_steps),
        "num_request_steps": float(result.num_request_steps),
        "end_s": result.end_ns / NS,
        "span_s": (max(result.requests.arrival_ns) - min(result.requests.arrival_ns)) / NS,
        "num_idle_steps": float(result.num_idle_steps),
    }
    if job.key.load == CAPACITY_LOAD and not result.error:
        facts["capacity"] = burst_capacity(result)
    return RunRecord(
        run_id=job.run_id,
        key=job.key,
        status="failed" if result.error else "ok",
        error=result.error,
        values=metrics.values,
        classes=metrics.classes,
        num_measured=metrics.num_measured,
        num_censored=metrics.num_censored,
        num_failed=metrics.num_failed,
        workload=_described(built),
        facts=facts,
    )


def burst_capacity(result: RunResult) -> float:
    """Return the completed requests per second of a burst.

    Counts only until `CAPACITY_SHARE` of the requests have ended: the last requests run in small
    batches, which do not represent a loaded engine. Raises ValueError if no request ended.
    """
    ends = sorted(end for end in result.requests.finished_ns if end != NEVER)
    count = int(len(ends) * CAPACITY_SHARE) or len(ends)
    if not count or ends[count - 1] <= 0:
        raise ValueError("no request of the burst has finished, so the capacity is unknown")
    return count / ends[count - 1] * NS


def _described(built: BuiltWorkload) -> dict[str, Any]:
    workload: Workload = built.workload
    requests = workload.requests
    return {
        "name": workload.name,
        "fingerprint": workload.fingerprint,
        "num_requests": len(requests),
        "num_clipped": built.num_clipped,
        "num_dropped": built.num_dropped,
        "overlap": built.overlap,
        "prompt_tokens": sum(item.num_prompt_tokens for item in requests),
        "output_tokens": sum(item.num_output_tokens for item in requests),
    }
