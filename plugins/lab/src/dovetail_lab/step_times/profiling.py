"""Measures the step times of a model on this machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from dovetail.clock import Clock
from dovetail.errors import UserError
from dovetail_lab.real_engine.engine import RealEngine
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.step_times.calibrated import CalibratedStepTimes
from dovetail_lab.step_times.calibration import (
    Calibration,
    FitQuality,
    MeasuredEngine,
    MeasuredModel,
)
from dovetail_lab.step_times.design import design
from dovetail_lab.step_times.fitting import fit_steps
from dovetail_lab.step_times.machine_info import (
    code_commit,
    config_digest,
    local_config,
    model_name,
    this_machine,
)
from dovetail_lab.step_times.samples import StepRecorder, StepSample
from dovetail_lab.workloads.workload import Workload

MIN_PASSES = 2
_NS = 1_000_000_000
_BURST_MARK = "decodes"
_MIN_WORKLOADS = 6
"""Minimum number of workloads that a pass measures."""

OnProgress = Callable[[int, int, float], None]
"""Called with (finished passes, measured steps, elapsed seconds)."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Errors of modeled times; see `FitQuality`."""

    num_steps: int
    bias: float
    mape: float


def profile(
    model: str,
    setup: EngineSetup,
    clock: Clock,
    *,
    seconds: float,
    num_threads: int = 0,
    on_progress: OnProgress = lambda passes, steps, seconds: None,
) -> Calibration:
    """Measure a model on this machine, and return its calibration.

    The measurements are repeated at least twice, in random order, for about `seconds` seconds; for
    slow models see `_measure`. setup: the measured engine. Its limits are the largest that the
    calibration covers. num_threads: CPU threads; 0 for the platform's choice. Raises DovetailError
    if the engine cannot be created or a run fails.
    """
    options: Mapping[str, Any] = {"num_threads": num_threads} if num_threads else {}
    with RealEngine(model, setup, options) as engine:
        run_recorded(engine, design(setup.limits, _num_tokens(setup), 0)[0], setup)  # warm-up
        passes = _measure(engine, setup, clock, seconds, on_progress)
    measured = MeasuredModel(
        name=model_name(model), config_digest=config_digest(local_config(model))
    )
    return make_calibration(passes, setup, measured, num_threads)


def run_recorded(
    engine: RealEngine, workload: Workload, setup: EngineSetup
) -> Sequence[StepSample]:
    """Run a workload on the engine. Return its steps. Raises UserError if the run fails."""
    recorder = StepRecorder()
    result = engine.run(workload, setup, recorder=recorder)
    if result.error:
        raise UserError(f"the measurement failed: {result.error}")
    return recorder.samples()


def model_quality(samples: Sequence[StepSample], model: CalibratedStepTimes) -> Quality:
    """Return the errors of modeled times for measured steps."""
    measured = np.array([item.duration_ns for item in samples], dtype=np.float64)
    modeled = np.array(
        [model.time_ns(item.features, item.after) for item in samples], dtype=np.float64
    )
    return _quality(measured, modeled)


def repeat_quality(first: Sequence[StepSample], second: Sequence[StepSample]) -> Quality:
    """Return the errors if one measurement of the same steps is used to predict another."""
    pairs = [
        (a.duration_ns, b.duration_ns)
        for a, b in zip(first, second, strict=False)
        if a.features == b.features
    ]
    columns = np.array(pairs, dtype=np.float64).reshape(len(pairs), 2)
    return _quality(columns[:, 0], columns[:, 1])


def _quality(measured: Any, modeled: Any) -> Quality:
    if not len(measured):
        return Quality(num_steps=0, bias=0.0, mape=0.0)
    return Quality(
        num_steps=len(measured),
        bias=float(modeled.sum() / measured.sum() - 1),
        mape=float(np.mean(np.abs(modeled - measured) / measured)),
    )


def _measure(
    engine: RealEngine, setup: EngineSetup, clock: Clock, seconds: float, on_progress: OnProgress
) -> Sequence[Mapping[str, Sequence[StepSample]]]:
    """Return the steps of each pass, by the name of the workload.

    The first pass ends after half of the time. For a slow model, some decode batches are therefore
    measured twice, and not all of them once.
    """
    start_ns, passes = clock.now_ns(), list[dict[str, Sequence[StepSample]]]()

    def passed_s() -> float:
        return (clock.now_ns() - start_ns) / _NS

    while len(passes) < MIN_PASSES or passed_s() < seconds:
        measured: dict[str, Sequence[StepSample]] = {}
        for workload in _order(design(setup.limits, _num_tokens(setup), len(passes)), len(passes)):
            is_decodes = _BURST_MARK in workload.name
            if passes and workload.name not in passes[0]:
                continue
            enough = is_decodes and len(measured) >= _MIN_WORKLOADS and len(passes) != 1
            if enough and passed_s() > (seconds if passes else seconds / MIN_PASSES):
                break
            measured[workload.name] = run_recorded(engine, workload, setup)
        passes.append(measured)
        num_steps = sum(len(steps) for item in passes for steps in item.values())
        on_progress(len(passes), num_steps, passed_s())
    return passes


def _order(workloads: Sequence[Workload], number: int) -> Sequence[Workload]:
    """Return the workloads of a pass: batches of decodes last and in random order."""
    decodes = [item for item in workloads if _BURST_MARK in item.name]
    random.Random(number).shuffle(decodes)
    return [*(item for item in workloads if item not in decodes), *decodes]


def make_calibration(
    passes: Sequence[Mapping[str, Sequence[StepSample]]],
    setup: EngineSetup,
    model: MeasuredModel,
    num_threads: int,
) -> Calibration:
    """Return the calibration from the measured passes over all workloads."""
    samples = [step for item in passes for steps in item.values() for step in steps]
    fit, limits = fit_steps(samples), setup.limits
    unknown = FitQuality(num_steps=0, bias=0.0, mape=0.0, repeat_mape=0.0)
    calibration = Calibration(
        model=model,
        machine=this_machine(),
        engine=MeasuredEngine(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_size=setup.block_size,
            num_threads=num_threads,
        ),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=code_commit(),
        step_ps=dict(fit.step_ps),
        batch_change_ps=fit.batch_change_ps,
        gap_ps=fit.gap_ps,
        prefill_gap_ps=fit.prefill_gap_ps,
        decode_factors=fit.decode_factors,
        prefill_factors=fit.prefill_factors,
        quality=unknown,
    )
    quality = model_quality(samples, CalibratedStepTimes(calibration))
    names = [name for name in passes[0] if _BURST_MARK in name]
    repeats = repeat_quality(
        [step for name in names for step in passes[0][name]],
        [step for name in names for step in passes[1][name]],
    )
    return calibration.model_copy(
        update={
            "quality": FitQuality(
                num_steps=quality.num_steps,
                bias=round(quality.bias, 6),
                mape=round(quality.mape, 6),
                repeat_mape=round(repeats.mape, 6),
            )
        }
    )


def _num_tokens(setup: EngineSetup) -> int:
    return (setup.num_blocks - 1) * setup.block_size
