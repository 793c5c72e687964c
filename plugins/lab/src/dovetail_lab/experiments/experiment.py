"""Runs an experiment: measures the capacity, executes missing runs, and returns the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dovetail.clock import Clock, MonotonicClock
from dovetail.errors import UserError
from dovetail_lab.experiments.job import Job
from dovetail_lab.experiments.pool import COMMAND, WorkerPool
from dovetail_lab.experiments.results import Results
from dovetail_lab.experiments.run_files import RunFolder, RunRecord
from dovetail_lab.experiments.run_key import CAPACITY_LOAD, RunKey, run_id
from dovetail_lab.experiments.spec import ExperimentSpec
from dovetail_lab.output_errors import output_errors
from dovetail_lab.workloads.building import BURST, workload_fingerprint

OnProgress = Callable[[int, int, RunRecord | None], None]
"""Called with (number of finished runs, number of runs, the last run)."""


def _ignore(done: int, total: int, record: RunRecord | None) -> None:
    """Report nothing."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for running an experiment. They do not change the result of a run.

    out: directory of the results. num_workers: processes. max_seeds: run only this many of the
    experiment's seeds; 0 for all. command: starts a worker process. pool: a worker pool shared with
    other experiments; None to start a new pool for this experiment.
    """

    out: Path
    num_workers: int = 1
    max_seeds: int = 0
    trust_local_code: bool = False
    clock: Clock = field(default_factory=MonotonicClock)
    command: Sequence[str] = COMMAND
    on_progress: OnProgress = _ignore
    pool: WorkerPool | None = None

    def make_pool(self) -> WorkerPool:
        """Return a new pool of processes; its log is in the directory `out`."""
        with output_errors("out", self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            log = self.out / "workers.log"
            return WorkerPool(self.num_workers, self.clock, log, command=self.command)


def run_experiment(spec: ExperimentSpec, options: RunOptions) -> Results:
    """Execute the runs that are missing in the directory, and return all results.

    Runs of other experiments in the directory are reused if their ids are equal. A failed run is
    repeated. Raises UserError if the directory cannot be written or the capacity cannot be
    measured.
    """
    if options.pool is None:
        with options.make_pool() as pool:
            return run_experiment(spec, replace(options, pool=pool))
    runs = options.out / "runs"
    with output_errors("out", options.out):
        runs.mkdir(parents=True, exist_ok=True)
        output = json.dumps(spec.model_dump(mode="json"), indent=1)
        (options.out / "experiment.json").write_text(output, "utf-8")
    folder = RunFolder(runs)
    seeds = range(spec.first_seed, spec.first_seed + (options.max_seeds or spec.seeds))
    capacity = _capacities(spec, seeds, options, folder)
    keys = [
        RunKey(
            policy=policy.name,
            load=load,
            rate=_rate(load, capacity[seed]),
            seed=seed,
            engine=engine,
        )
        for seed in seeds
        for load in spec.loads
        for engine in spec.engines
        for policy in spec.policies
    ]
    records, num_reused = _run_all(spec, keys, options, folder)
    return Results(
        spec=spec,
        capacity=sum(capacity.values()) / len(capacity),
        records=records,
        folder=folder,
        num_reused=num_reused,
    )


def make_job(spec: ExperimentSpec, key: RunKey, folder: RunFolder, *, trust: bool) -> Job:
    """Return the job for a run. The steps of the first seed are stored for charts."""
    fingerprint = workload_fingerprint(
        spec.workload,
        rate=key.rate or BURST,
        seed=key.seed,
        num_seeds=spec.seeds,
        max_model_len=spec.setup.max_model_len,
    )
    return Job(
        run_id=run_id(spec, key, fingerprint, trust_local_code=trust),
        spec=spec,
        key=key,
        folder=str(folder.folder),
        keep_steps=key.seed == spec.first_seed,
        trust_local_code=trust,
    )


def _rate(load: float, capacity: float) -> float:
    return float(f"{load * capacity:.6g}")


def _capacities(
    spec: ExperimentSpec, seeds: Sequence[int], options: RunOptions, folder: RunFolder
) -> dict[int, float]:
    """Return the capacity of each seed's workload in requests per second, on the first engine.

    The request lengths depend on the seed, so the same rate is a different load for each seed.
    """
    baseline = spec.policies[0].name
    keys = [
        RunKey(policy=baseline, load=CAPACITY_LOAD, rate=0.0, seed=seed, engine=spec.engines[0])
        for seed in seeds
    ]
    records, _ = _run_all(spec, keys, options, folder)
    for record in records:
        if not record.ok:
            raise UserError(
                f"the burst run of the baseline {baseline!r} failed, so the capacity is unknown: "
                f"{record.error}"
            )
    return {record.key.seed: record.facts["capacity"] for record in records}


def _run_all(
    spec: ExperimentSpec, keys: Sequence[RunKey], options: RunOptions, folder: RunFolder
) -> tuple[list[RunRecord], int]:
    """Return the record of each key, in order, and how many records were already stored."""
    trust = options.trust_local_code
    jobs = [make_job(spec, key, folder, trust=trust) for key in keys]
    done: dict[str, RunRecord] = {}
    for job in jobs:
        record = folder.read(job.run_id)
        if record is not None and record.ok:
            done[job.run_id] = record
    num_reused = sum(job.run_id in done for job in jobs)
    missing = list({job.run_id: job for job in jobs if job.run_id not in done}.values())

    def store(record: RunRecord) -> None:
        done[record.run_id] = record
        options.on_progress(len(done), len(jobs), record)

    options.on_progress(len(done), len(jobs), None)
    if missing and options.pool is not None:
        options.pool.run(missing, spec.time_limit_s, store)
    return [replace(done[job.run_id], key=job.key) for job in jobs], num_reused
