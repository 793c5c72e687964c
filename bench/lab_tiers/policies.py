"""T4: which of two policies is better, according to the real engine and to the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

from dovetail_lab.experiments.statistics import paired_difference
from dovetail_lab.real_engine.engine import RealEngine
from dovetail_lab.simulation.setup import StepTimeModel
from dovetail_lab.simulation.simulate import simulate
from lab_tiers.latencies import measured_capacity
from lab_tiers.tables import Table, make_setup, make_workload, metrics_of

SOURCE = {"trace": "azure:conv"}
POLICIES = ("fcfs", "static", "sarathi", "sjf", "hrrn")
OPTIONS = {"sarathi": {"chunk": 64}}
LOAD = 0.95
METRICS = {
    "ttft_mean": "TTFT, mean",
    "tpot_mean": "TPOT, mean",
    "e2e_mean": "end-to-end latency, mean",
    "gap_mean": "largest gap, mean",
    "norm_latency": "normalized latency",
}
TAU_LIMIT = 0.9

Values = Mapping[str, list[Mapping[str, float | None]]]
"""Maps a policy to the metrics of each seed."""


def new_table() -> Table:
    """Return the table without rows."""
    return Table(
        tier="T4",
        columns=(
            "model",
            "metric",
            "pairs of policies",
            "real interval excludes zero",
            "same sign in the simulator",
            "Kendall τ over these",
            "passed",
        ),
    )


def run_policies(
    engine: RealEngine,
    model: str,
    step_times: StepTimeModel,
    table: Table,
    log: Callable[[str], None],
    *,
    num_requests: int,
    num_seeds: int,
) -> None:
    """Run all policies on both engines, with the same workloads, and add the rows to the table."""
    rate = LOAD * measured_capacity(engine, num_requests)
    real: Values = {name: [] for name in POLICIES}
    simulated: Values = {name: [] for name in POLICIES}
    for seed in range(num_seeds):
        workload = make_workload(SOURCE, num_requests, rate, seed)
        for name in POLICIES:
            setup = make_setup(name, OPTIONS.get(name))
            real[name].append(metrics_of(engine.run(workload, setup), workload))
            simulated[name].append(metrics_of(simulate(workload, setup, step_times), workload))
        log(f"T4 {model}: seed {seed + 1} of {num_seeds}")
    for metric, label in METRICS.items():
        table.rows.append((model, label, *_judge(table, metric, real, simulated)))


def _judge(table: Table, metric: str, real: Values, simulated: Values) -> list[str]:
    """Return the cells of a metric."""
    pairs = [*combinations(POLICIES, 2)]
    same = clear = 0
    for pair in pairs:
        measured = paired_difference(*(_column(real[name], metric) for name in pair))
        if not measured.excludes_zero:
            continue
        modeled = paired_difference(*(_column(simulated[name], metric) for name in pair))
        clear += 1
        same += measured.t.mean * modeled.t.mean > 0
    tau = (2 * same - clear) / clear if clear else 0.0
    shown = f"{tau:.2f}" if clear else "–"
    word = table.judge(same == clear and tau >= TAU_LIMIT) if clear else "no pair"
    return [str(len(pairs)), str(clear), str(same), shown, word]


def _column(values: list[Mapping[str, float | None]], metric: str) -> list[float]:
    return [float(item[metric] or 0) for item in values]
