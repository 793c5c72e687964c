"""`dovetail lab run`: simulate one policy on one workload, with a decision log and a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line, print_table
from dovetail.cli.terminal import count_text
from dovetail.errors import UserError
from dovetail_lab.commands.experiment_options import (
    DEFAULT_OPTIONS,
    RUN_GROUP,
    ExperimentOptions,
    one_load,
)
from dovetail_lab.experiments.engines import run_workload
from dovetail_lab.experiments.job import built_workload, burst_capacity
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.run_key import CAPACITY_LOAD, RunKey
from dovetail_lab.experiments.run_metrics import measure_run
from dovetail_lab.experiments.spec import ExperimentSpec
from dovetail_lab.output_errors import output_errors
from dovetail_lab.reports.perfetto import write_trace
from dovetail_lab.reports.tables import number_text
from dovetail_lab.simulation.results import RunResult

_POLICY_HELP = "The policy: a name, or ./file.py:Class."
_SEED_HELP = "Seed of the workload, from 0; the number of seeds comes from --seeds."
_LOG_HELP = "Write the decision log to this new file, for lab explain and lab diff."
_TRACE_HELP = "Write a Chrome trace to this file, for Perfetto."
_TRUST_HELP = "Run a policy that is given as ./file.py:Class."


def run_once(
    policy: Annotated[str, Parameter(help=_POLICY_HELP)],
    /,
    *,
    seed: Annotated[int, Parameter(help=_SEED_HELP, group=RUN_GROUP)] = 0,
    decision_log: Annotated[
        Path | None, Parameter(help=_LOG_HELP, group=RUN_GROUP, show_default=False)
    ] = None,
    perfetto: Annotated[
        Path | None, Parameter(help=_TRACE_HELP, group=RUN_GROUP, show_default=False)
    ] = None,
    trust_local_code: Annotated[
        bool, Parameter(negative="", help=_TRUST_HELP, group=RUN_GROUP)
    ] = False,
    experiment: Annotated[ExperimentOptions, Parameter(name="*")] = DEFAULT_OPTIONS,
) -> int:
    """Simulate one policy on one workload at one load (0.9 by default), and print its metrics."""
    if experiment.engine not in (None, "sim"):
        raise UserError(f"--engine {experiment.engine}: this command only simulates.")
    spec = one_load(experiment.make_spec({"loads": (0.9,), "policies": (policy,)}))
    if decision_log is not None and spec.setup.replicas > 1:
        raise UserError("--decision-log records one engine; it cannot be used with replicas.")
    if not 0 <= seed < spec.seeds:
        raise UserError(f"--seed {seed} must be between 0 and {spec.seeds - 1}.")
    capacity = burst_capacity(
        _checked(_simulate(spec, _key(spec, CAPACITY_LOAD, 0.0, seed), trust_local_code))
    )
    load = spec.loads[0]
    key = _key(spec, load, float(f"{load * capacity:.6g}"), seed)
    result = _simulate(spec, key, trust_local_code, decision_log)
    requests = built_workload(spec, key).workload.requests
    print_line(
        f"{count_text(len(requests), 'request')} at {key.rate:.4g} requests/s (load {load:g}), "
        f"{result.num_steps:,} steps, {result.end_ns / 1e9:.2f} s of engine time."
    )
    metrics = measure_run(result, requests, spec.cut, spec.setup.block_size)
    rows = [
        (METRICS[name].label, number_text(value), METRICS[name].unit)
        for name, value in metrics.values.items()
        if value is not None
    ]
    print_table(("metric", "value", "unit"), rows)
    if perfetto is not None:
        names = [request.request_id for request in requests]
        with output_errors("--perfetto", perfetto):
            count = write_trace(perfetto, result.requests, result.steps, names)
        print_line(f"Wrote {perfetto}: {count:,} events. Open it at https://ui.perfetto.dev.")
    if decision_log is not None:
        print_line(f"Wrote {decision_log}")
    _checked(result)
    return 0


def _key(spec: ExperimentSpec, load: float, rate: float, seed: int) -> RunKey:
    return RunKey(policy=spec.policies[0].name, load=load, rate=rate, seed=seed, engine="sim")


def _simulate(
    spec: ExperimentSpec, key: RunKey, trust_local_code: bool, decision_log: Path | None = None
) -> RunResult:
    return run_workload(
        spec,
        key,
        built_workload(spec, key).workload,
        trust_local_code=trust_local_code,
        decision_log=decision_log,
    )


def _checked(result: RunResult) -> RunResult:
    if result.error:
        raise UserError(f"the run failed: {result.error}")
    return result
