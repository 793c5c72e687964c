"""T3: latencies of a simulated run compared with those of the real engine, at the same load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from dovetail_lab.experiments.job import burst_capacity
from dovetail_lab.real_engine.engine import RealEngine
from dovetail_lab.simulation.setup import StepTimeModel
from dovetail_lab.simulation.simulate import simulate
from lab_tiers.tables import Table, make_setup, make_workload, metrics_of

SOURCE = {"trace": "azure:conv"}
LOADS = 0.5, 0.7, 0.85
METRICS = ("ttft", "tpot", "e2e")
LIMITS = {"p50": 0.05, "p99": 0.10}


def new_table() -> Table:
    """Return the table without rows."""
    return Table(
        tier="T3",
        columns=(
            "model",
            "load",
            "metric",
            "real engine, median (ms)",
            "simulated (ms)",
            "error",
            "spread of the real runs",
            "passed",
        ),
    )


def measured_capacity(engine: RealEngine, num_requests: int) -> float:
    """Return the requests per second of a burst on the real engine."""
    workload = make_workload(SOURCE, num_requests, 0, seed=0)
    return burst_capacity(engine.run(workload, make_setup()))


def run_latencies(
    engine: RealEngine,
    model: str,
    step_times: StepTimeModel,
    table: Table,
    log: Callable[[str], None],
    *,
    num_requests: int,
    num_repeats: int,
) -> None:
    """Run the loads on the simulator and the real engine, and add the rows to the table."""
    capacity = measured_capacity(engine, num_requests)
    log(f"T3 {model}: {capacity:.1f} requests/s")
    for load in LOADS:
        workload = make_workload(SOURCE, num_requests, load * capacity, seed=0)
        real = [
            metrics_of(engine.run(workload, make_setup()), workload) for _ in range(num_repeats)
        ]
        simulated = metrics_of(simulate(workload, make_setup(), step_times), workload)
        for metric in METRICS:
            for kind, limit in LIMITS.items():
                name = f"{metric}_{kind}"
                values = [float(item[name] or 0) for item in real]
                row = _judge(table, values, float(simulated[name] or 0), limit)
                table.rows.append((model, f"{load:g}", f"{metric.upper()} {kind.upper()}", *row))
        log(f"T3 {model} load {load:g}: {num_repeats} real runs")


def _judge(table: Table, real: Sequence[float], simulated: float, limit: float) -> Sequence[str]:
    middle = median(real)
    error, spread = simulated / middle - 1, (max(real) - min(real)) / middle
    return (
        f"{middle * 1e3:.1f}",
        f"{simulated * 1e3:.1f}",
        f"{error:+.1%}",
        f"{spread:.1%}",
        table.judge(abs(error) <= max(limit, spread)),
    )
