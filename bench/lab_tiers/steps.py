"""T2: step times that a calibration predicts for steps that it was not fitted to.

Passes over the workloads of `dovetail lab profile` and over the held-out workloads alternate, so
that both are measured under the same conditions. The requests of the held-out workloads arrive
together, so each pass has the same steps, and two passes give the error between repeated
measurements.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from dovetail_lab.real_engine.engine import RealEngine
from dovetail_lab.step_times.calibrated import CalibratedStepTimes
from dovetail_lab.step_times.calibration import Calibration, MeasuredModel
from dovetail_lab.step_times.design import design
from dovetail_lab.step_times.machine_info import config_digest, local_config, model_name
from dovetail_lab.step_times.profiling import (
    make_calibration,
    model_quality,
    repeat_quality,
    run_recorded,
)
from dovetail_lab.step_times.samples import StepSample
from lab_tiers.tables import Table, make_setup, make_workload

HELD_OUT = {
    "azure:conv": {"trace": "azure:conv"},
    "azure:code": {"trace": "azure:code"},
    "conversations": {"synthetic": "chat"},
}
BIAS_LIMIT, MAPE_LIMIT, REPEAT_FACTOR = 0.01, 0.10, 1.2

Pass = Mapping[str, Sequence[StepSample]]


def new_table() -> Table:
    """Return the table without rows."""
    return Table(
        tier="T2",
        columns=(
            "model",
            "held-out workload",
            "steps",
            "bias",
            "bias between repeats",
            "mean absolute error",
            "error between repeats",
            "passed",
        ),
    )


def run_steps(
    engine: RealEngine,
    model: str,
    table: Table,
    log: Callable[[str], None],
    *,
    num_passes: int,
    num_requests: int,
    num_threads: int,
) -> Calibration:
    """Measure a model, add its rows to the table, and return its calibration."""
    setup, grid, held_out = make_setup(), list[Pass](), list[Pass]()
    num_tokens = (setup.num_blocks - 1) * setup.block_size
    for number in range(num_passes):
        held_out.append(_pass(engine, num_requests))
        workloads = list(design(setup.limits, num_tokens, number))
        random.Random(number).shuffle(workloads)
        grid.append({item.name: run_recorded(engine, item, setup) for item in workloads})
        log(f"T2 {model}: pass {number + 1} of {num_passes}")
    held_out.append(_pass(engine, num_requests))
    name = model_name(model)
    measured = MeasuredModel(name=name, config_digest=config_digest(local_config(model)))
    calibration = make_calibration(grid, setup, measured, num_threads)
    step_times = CalibratedStepTimes(calibration)
    for source in HELD_OUT:
        _add_row(table, name, source, held_out, step_times)
    return calibration


def _pass(engine: RealEngine, num_requests: int) -> Pass:
    setup = make_setup()
    return {
        name: run_recorded(engine, make_workload(source, num_requests, 0, seed=1), setup)
        for name, source in HELD_OUT.items()
    }


def _add_row(
    table: Table, model: str, source: str, passes: Sequence[Pass], step_times: CalibratedStepTimes
) -> None:
    """Compare the model's times with all passes, and the first pass with each of the others."""
    steps = [step for item in passes for step in item[source]]
    quality = model_quality(steps, step_times)
    repeats = [repeat_quality(item[source], passes[0][source]) for item in passes[1:]]
    bias = max(abs(item.bias) for item in repeats)
    mape = sum(item.mape for item in repeats) / len(repeats)
    reached = abs(quality.bias) <= max(BIAS_LIMIT, REPEAT_FACTOR * bias)
    reached = reached and quality.mape <= max(MAPE_LIMIT, REPEAT_FACTOR * mape)
    table.rows.append(
        (
            model,
            source,
            f"{quality.num_steps:,}",
            f"{quality.bias:+.1%}",
            f"{bias:.1%}",
            f"{quality.mape:.1%}",
            f"{mape:.1%}",
            table.judge(reached),
        )
    )
